"""How much of this machine is ours."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cpus(quota: Path = CPU_QUOTA) -> int:
    """Processors this process may use: its affinity mask, and the container's quota where there is one.

    `quota`: a cgroup v2 `cpu.max` file, "MICROSECONDS PERIOD" or "max PERIOD" (Linux, cgroup-v2.rst).
    """
    allowed = len(cores()) or os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        limit, period = quota.read_text().split()
        return max(1, min(allowed, int(limit) // int(period)))
    return allowed


def has_terminal() -> bool:
    """Whether this process has a controlling terminal; one that was closed is none (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def cores() -> set[int]:
    """The cores this process may use, by number; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
