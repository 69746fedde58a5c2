"""Ends the programs that a process started when that process dies, also where it was killed.

this process ─ writing end of a pipe ─> guard: reads the end of the file ─> SIGKILL to the process group

The kernel kills a child with its parent only if the child asks for it (`parent_death`); a compiler's own programs, such
as g++ and what that starts, do not. Linux and macOS.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from millstream.services.process.descriptors import close_all_but


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
