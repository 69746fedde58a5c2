"""Model checks wait for a slot, and a check that never ends does not block the others."""

from __future__ import annotations

import asyncio
from contextvars import copy_context

from millstream.services.ingest.check_process import CHECKS_MAX, CHECKS_RUNNING_MAX, CheckSlots
from millstream.services.process.audit import acting


class Checks:
    """Checks that run until `end` is called."""

    def __init__(self, slots: CheckSlots) -> None:
        self._slots = slots
        self.running: list[int] = []
        self._ends: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, number: int, caller: str = "anyone") -> None:
        context = copy_context()
        context.run(acting, caller)
        self._ends[number] = asyncio.Event()
        self._tasks[number] = asyncio.create_task(self._run(number), context=context)

    async def _run(self, number: int) -> None:
        async with self._slots.acquire():
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


async def checks_beyond_the_slots_wait() -> None:
    checks = Checks(CheckSlots(long_check_s=3600))
    for number in range(CHECKS_MAX + 2):
        checks.begin(number)
    await checks.runs(0, 1)
    await checks.end(0)
    await checks.runs(1, 2)
    await checks.cancel(1)
    await checks.runs(2, 3)
    await checks.end(2)
    await checks.end(3)


async def long_checks_free_their_slots() -> None:
    checks = Checks(CheckSlots(long_check_s=0))
    for number in range(CHECKS_RUNNING_MAX + 2):
        checks.begin(number)
    await checks.runs(*range(CHECKS_RUNNING_MAX))
    await checks.end(0)
    await checks.cancel(3)
    await checks.runs(1, 2, *range(4, CHECKS_RUNNING_MAX + 2))
    for number in list(checks.running):
        await checks.end(number)


async def check_for_two(long_check_s: float, at_once: int) -> None:
    checks = Checks(CheckSlots(long_check_s))
    for number in range(at_once + 2):
        checks.begin(number, "greedy")
    await checks.runs(*range(at_once))
    checks.begin(100, "other")
    await checks.runs(*range(at_once), 100)
    await checks.end(100)
    await checks.end(0)
    await checks.runs(*range(1, at_once + 1))
    for number in range(1, at_once + 2):
        await checks.end(number)


async def check_one_after_another() -> None:
    slots = CheckSlots(long_check_s=3600)
    checks = Checks(slots)
    for number in range(20):
        checks.begin(number)
        await checks.runs(number)
        await checks.end(number)
    for number in range(20, 25):
        checks.begin(number)
    await checks.runs(20, 21)
    for number in range(20, 25):
        await checks.end(number)


def test_checks_beyond_the_slots_wait() -> None:
    asyncio.run(checks_beyond_the_slots_wait())


def test_a_long_check_frees_its_slot_up_to_the_limit_of_running_checks() -> None:
    asyncio.run(long_checks_free_their_slots())


def test_the_first_check_of_a_caller_does_not_wait_for_many_of_another() -> None:
    asyncio.run(check_for_two(3600, CHECKS_MAX))
    asyncio.run(check_for_two(0, CHECKS_RUNNING_MAX))


def test_a_slot_is_freed_exactly_once() -> None:
    asyncio.run(check_one_after_another())
