"""offload: work over many bytes runs in a thread, and little of it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")

#: from so many bytes on, reading or writing them would keep the event loop's other requests waiting
APART_BYTES_MIN = 64 * 1024
#: numbers as Python's objects are many times as large as their text: more at once would cost memory and gain no time
APART_AT_ONCE_MAX = 2

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def run_in_thread_if_large(size_bytes: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(…)`, in a thread if it is about many bytes."""
    if size_bytes < APART_BYTES_MIN:
        return work(*args, **kwargs)
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(APART_AT_ONCE_MAX))
    async with slots:
        return await asyncio.to_thread(work, *args, **kwargs)
