"""Checks of models take turns, and those that never end keep nobody waiting."""

from __future__ import annotations

import asyncio

from millstream.services.ingest.check_slots import CHECKS_BESIDE_MAX, CHECKS_MAX, CheckSlots


class Checks:
    """Checks that run until they are told to end."""

    def __init__(self, turns: CheckSlots) -> None:
        self._turns = turns
        self.running: list[int] = []
        self._ends: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, number: int) -> None:
        self._ends[number] = asyncio.Event()
        self._tasks[number] = asyncio.create_task(self._run(number))

    async def _run(self, number: int) -> None:
        async with self._turns.turn():
            self.running.append(number)
            try:
                await self._ends[number].wait()
            finally:
                self.running.remove(number)

    async def end(self, number: int) -> None:
        self._ends[number].set()
        await self._tasks[number]

    async def cancel(self, number: int) -> None:
        self._tasks[number].cancel()
        await asyncio.wait({self._tasks[number]})

    async def runs(self, *numbers: int) -> None:
        async with asyncio.timeout(30):
            while self.running != list(numbers):
                await asyncio.sleep(0)


async def a_few_at_once() -> None:
    checks = Checks(CheckSlots(set_aside_s=3600))
    for number in range(CHECKS_MAX + 2):
        checks.begin(number)
    await checks.runs(0, 1)
    await checks.end(0)
    await checks.runs(1, 2)
    await checks.cancel(1)
    await checks.runs(2, 3)
    await checks.end(2)
    await checks.end(3)


async def checks_that_never_end() -> None:
    checks = Checks(CheckSlots(set_aside_s=0))
    for number in range(CHECKS_BESIDE_MAX + 2):
        checks.begin(number)
    await checks.runs(*range(CHECKS_BESIDE_MAX))
    await checks.end(0)
    await checks.cancel(3)
    await checks.runs(1, 2, *range(4, CHECKS_BESIDE_MAX + 2))
    for number in list(checks.running):
        await checks.end(number)


async def one_after_the_other() -> None:
    turns = CheckSlots(set_aside_s=3600)
    checks = Checks(turns)
    for number in range(20):
        checks.begin(number)
        await checks.runs(number)
        await checks.end(number)
    for number in range(20, 25):
        checks.begin(number)
    await checks.runs(20, 21)
    for number in range(20, 25):
        await checks.end(number)


def test_a_few_at_once() -> None:
    asyncio.run(a_few_at_once())


def test_checks_that_never_end_let_the_others_begin_up_to_a_limit() -> None:
    asyncio.run(checks_that_never_end())


def test_a_place_is_given_up_once() -> None:
    asyncio.run(one_after_the_other())
