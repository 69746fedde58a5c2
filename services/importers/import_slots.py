"""Shares the imports that run at once among callers: each may take gigabytes, and minutes.

caller ─> acquire ─> a slot at once; else in line, those first of whom fewest run, then who came first
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

#: imports that run at once; further ones wait
IMPORTS_MAX = 2
#: the same with the first import of each caller, which does not wait for the second of another
IMPORTS_OF_CALLERS_MAX = 4


class _Place(NamedTuple):
    """A place in line."""

    caller: str
    admitted: asyncio.Future[None]


class ImportSlots:
    """Slots for the imports of one event loop."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._waiting: list[_Place] = []

    @asynccontextmanager
    async def acquire(self, caller: str) -> AsyncIterator[None]:
        """Wait for a slot; run the import inside the `async with` block. `caller`: the name of a key, or an address."""
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
                self._running += Counter()  # forgets callers that run none
                self._admit()

    def _admit(self) -> None:
        while allowed := [place for place in self._waiting if self._may_run(place.caller)]:
            first = min(allowed, key=lambda place: self._running[place.caller])
            self._waiting.remove(first)
            self._running[first.caller] += 1
            first.admitted.set_result(None)

    def _may_run(self, caller: str) -> bool:
        running = self._running.total()
        return running < (IMPORTS_MAX if self._running[caller] else IMPORTS_OF_CALLERS_MAX)
