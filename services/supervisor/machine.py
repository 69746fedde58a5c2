"""The share of this machine that this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cpus(quota: Path = CPU_QUOTA) -> int:
    """Return the number of processors this process may use: its affinity mask, limited by the container's quota.

    `quota` is a cgroup v2 `cpu.max` file, "MICROSECONDS PERIOD" or "max PERIOD" (Linux, cgroup-v2.rst).
    """
    allowed = len(cores()) or os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        limit, period = quota.read_text().split()
        return max(1, min(allowed, int(limit) // int(period)))
    return allowed


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still open (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def cores() -> set[int]:
    """Return the numbers of the cores this process may use; empty if the system does not report them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
