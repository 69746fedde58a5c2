"""How many checks of models run at once: each takes a core and memory.

A check that takes long lets the next begin beside it, so that models whose check never ends keep nobody else waiting:
neither uploads nor the other models of a repository.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from weakref import WeakKeyDictionary

CHECKS_MAX = 2
CHECKS_BESIDE_MAX = 8  # with those that take long
SET_ASIDE_S = 5.0


class CheckSlots:
    """The places for checks. `set_aside_s`: how long a check keeps its own."""

    def __init__(self, set_aside_s: float = SET_ASIDE_S) -> None:
        self._set_aside_s = set_aside_s
        self._places = asyncio.Semaphore(CHECKS_MAX)
        self._beside = asyncio.Semaphore(CHECKS_BESIDE_MAX)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The right to run a check: hold it meanwhile."""
        async with self._beside:
            await self._places.acquire()
            over = asyncio.Event()
            place = asyncio.create_task(self._keep_place(over), name="a check's place")
            try:
                yield
            finally:
                over.set()
                await asyncio.shield(place)

    async def _keep_place(self, over: asyncio.Event) -> None:
        """Give the place up when the check is over, or takes long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._set_aside_s):
                await over.wait()
        self._places.release()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, CheckSlots] = WeakKeyDictionary()


def turn() -> AbstractAsyncContextManager[None]:
    """The right to run a check in this process: hold it with `async with` meanwhile."""
    return _turns.setdefault(asyncio.get_running_loop(), CheckSlots()).turn()
