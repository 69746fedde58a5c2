"""The memory available to this process and its siblings, and the share of one worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: Share of all workers together; the rest is for gateways, Redis, shared memory and the system.
WORKERS_SHARE = 0.8
#: With less memory a worker cannot load any model.
WORKER_BYTES_MIN = 512 << 20
_UNLIMITED = 1 << 60  # version 1 of cgroups shows a number near 2^63 if there is no limit


def total_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory of the machine, or the smallest limit of this process' control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(groups, own)])


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """Yield the limits of this process' control groups and of their parents.

    Source: cgroups(7) and the kernel's cgroup-v2.rst, "memory.max". In a container the process is often in the root.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"} and "memory" not in controllers.split(","):
            continue
        root, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            try:
                limit = int((folder / name).read_text())
            except (OSError, ValueError):  # not there, or "max"
                limit = _UNLIMITED
            if limit < _UNLIMITED:
                yield limit
            if folder == root:
                break


def worker_share(total: int, workers: int) -> int:
    """Return the bytes of `total` that each of `workers` workers may use."""
    return max(WORKER_BYTES_MIN, int(total * WORKERS_SHARE) // max(1, workers))
