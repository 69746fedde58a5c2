"""Imports, checks and uploads of one caller do not keep those of others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from millstream.plugins.convert.conversion import IMPORTS_MAX, IMPORTS_OF_CALLERS_MAX
from millstream.services.process.caller_slots import CallerSlots


class Imports:
    """Imports that run until they are ended. `running`: their callers, in the order of their starts."""

    def __init__(self) -> None:
        self._slots = CallerSlots(IMPORTS_MAX, IMPORTS_OF_CALLERS_MAX)
        self._ends: list[tuple[str, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> list[str]:
        return [caller for caller, _ in self._ends]

    async def start(self, *callers: str) -> None:
        self.tasks += [asyncio.create_task(self._run(caller)) for caller in callers]
        await self.settle()

    async def end(self, caller: str) -> None:
        at = self.running.index(caller)
        self._ends.pop(at)[1].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def _run(self, caller: str) -> None:
        async with self._slots.acquire(caller):
            end = asyncio.Event()
            self._ends.append((caller, end))
            await end.wait()


def run(scenario: Callable[[Imports], Awaitable[None]]) -> None:
    async def main() -> None:
        imports = Imports()
        await scenario(imports)
        for task in imports.tasks:
            task.cancel()
        await asyncio.gather(*imports.tasks, return_exceptions=True)
        assert not imports._slots._waiting
        assert not imports._slots._running

    asyncio.run(main())


def test_the_first_import_of_a_caller_does_not_wait_for_many_of_another() -> None:
    async def scenario(imports: Imports) -> None:
        await imports.start(*["greedy"] * 9)
        assert imports.running == ["greedy"] * IMPORTS_MAX
        await imports.start("other", "other")
        assert imports.running == [*["greedy"] * IMPORTS_MAX, "other"]

    run(scenario)


def test_slots_go_to_those_who_have_fewest_then_to_who_came_first() -> None:
    async def scenario(imports: Imports) -> None:
        await imports.start("a", "a", "a", "b", "c", "d", "e")
        assert sorted(imports.running) == ["a", "a", "b", "c"]
        assert len(imports.running) == IMPORTS_OF_CALLERS_MAX
        await imports.end("a")
        assert sorted(imports.running) == ["a", "b", "c", "d"]
        await imports.end("b")
        assert sorted(imports.running) == ["a", "c", "d", "e"]
        for caller in "cde":
            await imports.end(caller)
        assert imports.running == ["a", "a"]

    run(scenario)


@pytest.mark.parametrize("at", [0, 2])
def test_a_cancelled_import_leaves_its_slot_or_its_place(at: int) -> None:
    async def scenario(imports: Imports) -> None:
        await imports.start("a", "a", "a", "a")
        imports.tasks[at].cancel()
        await imports.settle()
        waiting = [task for task in imports.tasks if not task.done()]
        assert len(waiting) == 3
        await imports.start("b")
        assert "b" in imports.running

    run(scenario)
