"""Which thread work runs in, and at which priority.

many bytes ─> a thread of the event loop, a few at a time
changes of files ─> threads of their own: a slow disk, or a lock of another process, would make all other work wait

The nice level belongs to a thread in Linux, and threads that it starts inherit it. Without privileges it can only be
raised, so a thread that was lowered must end after its work, or do no other.
The level alone decides how the processor's time is shared, not when: a thread that wakes up waits until the running one
has used its slice of the time, or until the next tick of the kernel's clock, 4 ms where it ticks 250 times a second.
From Linux 6.12 on it does not wait if its own slice is shorter. So a lowered thread gets a slice that is longer.
Source: sched(7), sched_setattr(2); kernel/sched/features.h, PREEMPT_SHORT.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from millstream.services.process.c_library import c_library
from millstream.services.process.cancellation import uninterrupted

P = ParamSpec("P")
T = TypeVar("T")

#: Work on fewer bytes runs in the event loop; work on more would delay its other requests.
LARGE_BYTES_MIN = 64 * 1024
#: Python's number objects are many times larger than their text: more threads would cost memory and gain no time.
LARGE_THREADS_MAX = 2

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def run_in_thread_if_large(size_bytes: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `work(…)`, run in a thread if `size_bytes`, the bytes it works on, is large."""
    if size_bytes < LARGE_BYTES_MIN:
        return work(*args, **kwargs)
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(LARGE_THREADS_MAX))
    async with slots:
        return await asyncio.to_thread(work, *args, **kwargs)


STORAGE_THREADS_MAX = 8


async def in_storage_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `work(…)`, run in one of a few threads, which all event loops of this process share."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_threads(), partial(context.run, work, *args, **kwargs))


async def to_end_in_storage_thread(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Do the same, and wait for its end even if this task is cancelled meanwhile, as `uninterrupted` does."""
    return await uninterrupted(in_storage_thread(work, *args, **kwargs))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(STORAGE_THREADS_MAX, thread_name_prefix="storage")


#: About a tenth of the processor time of a thread of the normal level (sched(7)). Not 19: a thread that waits for the
#: processor while it has the interpreter's lock makes the threads of requests wait, too.
NICE = 10
_NICEST = 19
_AUTOGROUP = Path("/proc/self/autogroup")
_SLICE_NS = 100_000_000  # the longest that Linux takes
#: numbers of the call, which not every C library has a function for
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
#: struct sched_attr: size, policy, flags, nice level, priority, slice in ns, deadline, period, clamps of utilisation
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")


def lower_priority() -> None:
    """Lower the priority of the calling thread for the rest of its life, once; a main thread is left as it is.

    Where lowering is refused, nothing happens.
    """
    if threading.current_thread() is threading.main_thread():
        return
    thread = threading.get_native_id()
    try:
        normal = os.getpriority(os.PRIO_PROCESS, os.getpid())  # of the main thread
        if os.getpriority(os.PRIO_PROCESS, thread) <= normal:
            level = min(_NICEST, normal + NICE)
            os.setpriority(os.PRIO_PROCESS, thread, level)
            _lengthen_slice(level)
    except OSError:  # not Linux
        return


def _lengthen_slice(level: int) -> None:
    """Let the calling thread give way at once to threads that wake up. `level` is its nice level, which stays."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, level, 0, _SLICE_NS, 0, 0, 0, 0)
        c_library().syscall(number, 0, ctypes.c_char_p(attributes), 0)  # an older kernel ignores the slice


def at_low_priority(work: Callable[[], T]) -> T:
    """Run `work` in a thread of low priority and return its result; raises what it raises."""

    def lowered() -> T:
        lower_priority()
        return work()

    return in_own_thread(lowered)


def in_own_thread(work: Callable[[], T]) -> T:
    """Run `work`, which may lower its thread's priority, in a thread that ends with it; raises what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="own thread", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def lower_process(*, idle: bool = False, session: bool = False) -> None:
    """Lower the priority of this process and its future children for the rest of its life.

    To be called before other threads start. Where the kernel groups processes by session (sched(7), "The autogroup
    feature"), levels count only within a session, and the group's own is set, if the process leads its session. Where
    any of this is refused, the rest applies.

    Args:
        idle: leave it only the processor time that others do not want. The policy "idle" is preempted at once by a
            waking thread of any other policy.
        session: put it into a session of its own, whose level counts against the sessions of others.
    """
    level = _NICEST if idle else NICE
    if session:
        with suppress(OSError):
            os.setsid()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(level, os.getpriority(os.PRIO_PROCESS, 0)))
    if idle and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            _AUTOGROUP.write_text(str(level))
