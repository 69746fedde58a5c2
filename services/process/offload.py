"""Runs work on many bytes in a thread, a few pieces of work at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")

#: Work on fewer bytes runs in the event loop; work on more would delay its other requests.
LARGE_BYTES_MIN = 64 * 1024
#: Python's number objects are many times larger than their text: more threads would cost memory and gain no time.
THREADS_MAX = 2

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def run_in_thread_if_large(size_bytes: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `work(…)`, run in a thread if `size_bytes`, the bytes it works on, is large."""
    if size_bytes < LARGE_BYTES_MIN:
        return work(*args, **kwargs)
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(THREADS_MAX))
    async with slots:
        return await asyncio.to_thread(work, *args, **kwargs)
