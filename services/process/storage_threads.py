"""Threads for changes of files, apart from those in which requests are read and the catalog is kept.

A change may wait for seconds: for a slow disk, or for a lock that another process holds. In the threads of the event
loop, of which there are only a few more than cores, some such changes would make all other work of the process wait.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import ParamSpec, TypeVar

from millstream.services.process.uninterruptible import uninterrupted

P = ParamSpec("P")
T = TypeVar("T")

THREADS_MAX = 8


async def in_storage_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `work(…)`, run in one of at most THREADS_MAX threads, which all event loops of this process share."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_threads(), partial(context.run, work, *args, **kwargs))


async def to_end_in_storage_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Do the same, and wait for its end even if this task is cancelled meanwhile, as `uninterrupted` does."""
    return await uninterrupted(in_storage_thread(work, *args, **kwargs))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="storage")
