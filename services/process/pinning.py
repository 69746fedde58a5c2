"""Undoes the pinning of a process to cores in the programs that it starts, which inherit it.

A gateway may be pinned to one core of two, which its event loop needs. The checks and imports that it starts would all
share that core with it, while the other one idles.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from millstream.services.environment import PINNED_FROM, pinned_from
from millstream.services.process.cpu_share import cores


def pinning_environment(pinned: Collection[int]) -> dict[str, str]:
    """Return what the environment of a program tells it if it is pinned to the cores `pinned`; empty for none."""
    return {PINNED_FROM: ",".join(map(str, sorted(cores())))} if pinned else {}


def unpin() -> None:
    """Let this process run on all cores of its supervisor. Does nothing where no process is pinned."""
    allowed = {int(core) for core in pinned_from().split(",") if core.isdecimal()}
    if not allowed:
        return
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or a control group has taken the cores away
            os.sched_setaffinity(int(thread.name), allowed)
