"""What a process has open: standard input, output and error always, and of what it inherited only what it needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
