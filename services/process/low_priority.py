"""Work at low priority: of a thread in a process that also answers requests, or of a whole process.

The nice level belongs to a thread in Linux, and threads that it starts inherit it. Without privileges it can only be
raised, so a thread that was lowered must end after its work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_Result = TypeVar("_Result")

#: About a tenth of the processor time of a thread of the normal level (sched(7)). Not 19: a thread that waits for the
#: processor while it has the interpreter's lock makes the threads of requests wait, too.
NICE = 10
_NICEST = 19
_AUTOGROUP = Path("/proc/self/autogroup")


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
            os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, normal + NICE))
    except OSError:  # not Linux
        return


def at_low_priority(work: Callable[[], _Result]) -> _Result:
    """Run `work` in a thread of low priority and return its result; raises what it raises."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        lower_priority()
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="low priority", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def lower_process() -> None:
    """Give this process and its future children only the processor time that others leave, for the rest of its life.

    To be called before other threads start. The policy "idle" is preempted at once by a waking thread of any other
    policy; a low nice level alone may hold a processor for a time slice of some milliseconds. Where the kernel groups
    processes by session (sched(7), "The autogroup feature"), levels count only within a session, and the group's own
    is set: so the process gets a session of its own. Where any of this is refused, the rest applies.
    """
    with suppress(OSError):
        os.setsid()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICEST)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        _AUTOGROUP.write_text(str(_NICEST))
