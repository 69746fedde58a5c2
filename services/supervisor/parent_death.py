"""A child never outlives its parent: not even one that was killed and could not tell it to stop (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection
from functools import cache

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends (prctl(2), PR_SET_PDEATHSIG).

    `parent`: the process id the parent had when it forked; if it is gone already, this process ends here. Does
    nothing on systems without prctl.
    """
    if sys.platform != "linux":
        return
    _prctl()(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def tied_to_this_process(cores: Collection[int] = ()) -> Callable[[], None]:
    """A `preexec_fn` that calls `die_with_parent` in a child before it runs its program, on `cores` alone if any.

    Before, not in the child's own main: a child whose imports take a second would be loose for that second, and
    Redis has no main of ours. The setting outlives exec. The kernel watches the forking *thread*, so fork from one
    that lives as long as the process.
    """
    parent = os.getpid()
    if sys.platform == "linux":
        _prctl()  # looked up here: a forked child should do as little as it can

    def before_exec() -> None:
        die_with_parent(parent)
        if cores:
            os.sched_setaffinity(0, cores)

    return before_exec


@cache
def _prctl() -> Callable[..., int]:
    prctl: Callable[..., int] = ctypes.CDLL(None).prctl
    return prctl
