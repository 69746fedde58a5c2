"""The processors that this process may use: its affinity mask and the CPU quotas of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cores() -> set[int]:
    """Return the numbers of the cores this process may use; empty if the system does not report them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def cpu_share(groups: Path = GROUPS, own: Path = OWN) -> float:
    """Return how many processors this process may use, which a quota may limit to a part of one."""
    allowed = len(cores()) or os.cpu_count() or 1
    return min([float(allowed), *_quotas(groups, own)])


def cpus(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return how many threads can run at once, at least 1: the whole processors of `cpu_share`."""
    return max(1, int(cpu_share(groups, own)))


def _quotas(groups: Path, own: Path) -> Iterator[float]:
    """Yield the quotas, in processors, of this process' control groups and of their parents.

    Source: cgroups(7); the kernel's cgroup-v2.rst, `cpu.max` ("MICROSECONDS PERIOD" or "max PERIOD"), and for version 1
    sched-bwc.rst, `cpu.cfs_quota_us` (-1: none) and `cpu.cfs_period_us`. In a container the process is often in the
    root, whose files only the container's view has.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in (groups / controllers, groups / "cpu") if controllers else (groups, groups / "unified"):
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents):
                quota = _quota_v1(folder) if controllers else _quota_v2(folder)
                if quota is not None:
                    yield quota
                if folder == root:
                    break


def _quota_v2(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # not there, or "max"
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return limit / period if limit > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
