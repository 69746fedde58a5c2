"""How many checks of models run at once: each takes a core and memory."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

CHECKS_MAX = 2
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def turn() -> asyncio.Semaphore:
    """The right to run a check in this process: hold it with `async with` meanwhile."""
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(CHECKS_MAX))
