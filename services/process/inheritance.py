"""What a process inherits and hands on: descriptors, the death of its parent, and its own to what it started.

standard descriptors stay open, all others are closed; the kernel kills a child with its parent, if it asks for that
(prctl(2)). A compiler's own programs, such as g++ and what that starts, do not:
this process ─ writing end of a pipe ─> guard: reads the end of the file ─> SIGKILL to the process group
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from millstream.services.process.c_library import c_library

_OPEN = Path("/dev/fd")  # Linux and macOS


def open_standard_descriptors() -> None:
    """Open /dev/null in place of descriptors 0 to 2 that are closed.

    Otherwise the next pipes and sockets get these numbers: children would take them for their own output, and whatever
    is printed would go there.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def close_all_but(*kept: int) -> None:
    """Close all descriptors of this process but `kept`."""
    last = max((int(one.name) for one in _OPEN.iterdir()), default=-1)
    first = 0
    for fd in (*sorted(kept), last + 1):
        if first < fd:  # os.closerange(0, 0) closes all of them
            os.closerange(first, fd)
        first = fd + 1


def keep_from_children() -> None:
    """Let no program that this process starts inherit its descriptors, the standard ones aside.

    Event loops differ in whether a child that they start closes what it inherited.
    """
    for one in list(_OPEN.iterdir()):
        fd = int(one.name)
        if fd > 2:
            try:
                os.set_inheritable(fd, False)
            except OSError:  # the one that listed the folder
                continue


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


@contextmanager
def group_guard() -> Iterator[None]:
    """Fork a guard that kills this process's group, itself included, if this process dies within the block.

    Call it in a process that leads a group of its own, before other threads start and before the process gives up the
    right to fork. The guard keeps that right and the priority of this moment.
    """
    reading, writing = os.pipe()  # closed by exec: the programs do not hold it open
    guard = os.fork()
    if guard == 0:
        try:
            close_all_but(reading)
            if not os.read(reading, 1):
                os.killpg(0, signal.SIGKILL)
        finally:
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.write(writing, b".")
        os.close(writing)
        with suppress(ChildProcessError):  # this process is a child of the one that forked the guard
            os.waitpid(guard, 0)
