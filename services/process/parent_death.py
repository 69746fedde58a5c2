"""Makes the kernel kill a child when its parent dies, even if the parent was killed (Linux)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial

from millstream.services.process.c_library import c_library

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends (prctl(2), PR_SET_PDEATHSIG). Does nothing without prctl.

    `parent` is the pid of the parent when it forked; if that process has already ended, this process exits.
    """
    if sys.platform != "linux":
        return
    c_library().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def child_setup() -> Callable[[], None]:
    """Return a `preexec_fn` that calls `die_with_parent`.

    It runs before exec instead of in the child's main: a child whose imports take a second would be unprotected for
    that second, and Redis does not run our code. The setting survives exec. The kernel watches the forking *thread*,
    so fork from a thread that lives as long as the process.
    """
    if sys.platform == "linux":
        assert c_library().prctl  # looked up before the fork: a forked child should do as little as possible
    return partial(die_with_parent, os.getpid())
