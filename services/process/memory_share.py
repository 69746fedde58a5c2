"""How much memory there is for this process and its siblings, and which part of it one worker may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: what workers may take together; the rest is for gateways, Redis, shared memory and the system
WORKERS_SHARE = 0.8
#: less is not enough for a worker and any model
WORKER_BYTES_MIN = 512 << 20
_UNLIMITED = 1 << 60  # how version 1 of cgroups says that there is no limit: a number near 2^63


def total_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Memory of the machine, or the least limit of the control groups that this process is in."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits(groups, own)])


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """Limits of this process's control groups and of those around them.

    Source: cgroups(7) and the kernel's cgroup-v2.rst, "memory.max". In a container the own group often is the root.
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
    """Bytes that each of `workers` workers may take of `total`."""
    return max(WORKER_BYTES_MIN, int(total * WORKERS_SHARE) // max(1, workers))
