"""Work at low priority in a process that also answers requests.

The nice level belongs to a thread in Linux, and threads that it starts inherit it. Without privileges it can only be
raised, so a thread that was lowered must end after its work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

#: About a tenth of the processor time of a thread of the normal level (sched(7)). Not 19: a thread that waits for the
#: processor while it has the interpreter's lock makes the threads of requests wait, too.
NICE = 10
_NICEST = 19


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
