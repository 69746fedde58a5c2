"""Shares what few may do at once among callers: nobody's work, however slow, keeps the first of another waiting.

caller ─> acquire ─> a slot at once; else in line, those first of whom fewest run, then who came first
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple


class _Place(NamedTuple):
    """A place in line."""

    caller: str
    admitted: asyncio.Future[None]


class CallerSlots:
    """Slots of one event loop.

    Args:
        at_once_max: in use at once; further callers wait.
        of_callers_max: the same with the first of each caller, which does not wait for the second of another.
    """

    def __init__(self, at_once_max: int, of_callers_max: int) -> None:
        self._at_once_max = at_once_max
        self._of_callers_max = of_callers_max
        self._running: Counter[str] = Counter()
        self._waiting: list[_Place] = []

    @asynccontextmanager
    async def acquire(self, caller: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it inside the `async with` block. `caller`: the name of a key, or an address."""
        place = _Place(caller, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._admit()
        try:
            await place.admitted
            yield
        finally:
            if place in self._waiting:  # cancelled before it was admitted
                self._waiting.remove(place)
            else:
                self._running[caller] -= 1
                self._running += Counter()  # forgets callers that have none
                self._admit()

    def may_take(self, caller: str) -> bool:
        """Whether there is a slot for one more of this caller."""
        running = self._running.total()
        return running < (self._at_once_max if self._running[caller] else self._of_callers_max)

    def _admit(self) -> None:
        while allowed := [place for place in self._waiting if self.may_take(place.caller)]:
            first = min(allowed, key=lambda place: self._running[place.caller])
            self._waiting.remove(first)
            self._running[first.caller] += 1
            first.admitted.set_result(None)
