"""Limits how many model checks run at once: each takes a core and memory.

A check that runs for longer than LONG_CHECK_S frees its slot for the next one, so that a model whose check never ends
does not block uploads or the other models of a repository. The first check of a caller does not wait for many of
another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from weakref import WeakKeyDictionary

from millstream.services.process.audit import caller
from millstream.services.process.caller_slots import CallerSlots

#: slots: checks younger than LONG_CHECK_S that run at once; further checks wait
CHECKS_MAX = 2
#: the same with the first check of each caller
CHECKS_OF_CALLERS_MAX = 3
#: all checks that run at once, long ones included; further checks wait
CHECKS_RUNNING_MAX = 8
#: the same with the first check of each caller
CHECKS_RUNNING_OF_CALLERS_MAX = 16
LONG_CHECK_S = 5.0


class CheckSlots:
    """Slots for the checks of one event loop.

    Args:
        long_check_s: a check that runs for longer frees its slot, up to CHECKS_RUNNING_MAX checks in all.
    """

    def __init__(self, long_check_s: float = LONG_CHECK_S) -> None:
        self._long_check_s = long_check_s
        self._slots = CallerSlots(CHECKS_MAX, CHECKS_OF_CALLERS_MAX)
        self._running = CallerSlots(CHECKS_RUNNING_MAX, CHECKS_RUNNING_OF_CALLERS_MAX)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Wait for a slot; run the check inside the `async with` block."""
        async with self._running.acquire(caller()):
            slot = AsyncExitStack()
            await slot.enter_async_context(self._slots.acquire(caller()))
            finished = asyncio.Event()
            release = asyncio.create_task(self._release(slot, finished), name="release of a check slot")
            try:
                yield
            finally:
                finished.set()
                await asyncio.shield(release)

    async def _release(self, slot: AsyncExitStack, finished: asyncio.Event) -> None:
        """Free the slot when the check has finished or has run for `long_check_s`, whichever comes first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._long_check_s):
                await finished.wait()
        await slot.aclose()


_slots_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, CheckSlots] = WeakKeyDictionary()


def check_slot() -> AbstractAsyncContextManager[None]:
    """Return a context manager that waits for a check slot of this process and frees it at the end of the block."""
    return _slots_of_loop.setdefault(asyncio.get_running_loop(), CheckSlots()).acquire()
