"""Opens standard input, output and error where the process was started without them."""

from __future__ import annotations

import os
import sys


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
