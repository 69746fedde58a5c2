"""What this process may use of the machine: processors, memory, and the budget of one worker.

affinity mask, CPU quotas and memory limits of its control groups ─> cpus, total_bytes
"8GiB" or "cpu=8GiB,gpu=16GiB" ─> parse_memory ─> bytes of each worker by pool; without it an equal share
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from millstream.services.errors import invalid

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


#: Share of all workers together; the rest is for gateways, Redis, shared memory and the system.
WORKERS_SHARE = 0.8
#: Least share; with less memory a worker can load small models only.
WORKER_BYTES_MIN = 512 << 20
#: Least budget: the interpreter and the libraries take most of it.
BUDGET_BYTES_MIN = 256 << 20
EVERY_POOL = ""  # key of the budget of pools that are not named
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B)?", re.IGNORECASE)
_UNITS = {
    "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
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


def parse_memory(text: str) -> dict[str, int]:
    """Parse `8GiB` or `cpu=8GiB,gpu=16GiB` into the bytes of one worker by pool; 0: no limit.

    The key EVERY_POOL is for pools that are not named. Raises Failure(INVALID) with one line.
    """
    budgets: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = part.partition("=")
        pool, size = (name.strip(), size.strip()) if equals else (EVERY_POOL, part)
        if _SIZE.fullmatch(size) is None or (equals and not pool):
            raise invalid(f"--memory {part}: write a size like 8GiB or 500MB, or POOL=SIZE like cpu=8GiB")
        budget = parse_size(size)
        if 0 < budget < BUDGET_BYTES_MIN:
            raise invalid(
                f"--memory {part}: {size} is too small for one worker, which needs {BUDGET_BYTES_MIN >> 20}MiB"
            )
        if pool in budgets:
            what = f"the pool {pool}" if pool else "every worker"
            raise invalid(f"--memory {part}: the memory of {what} is given twice")
        budgets[pool] = budget
    if not budgets:
        raise invalid("--memory: write a size like 8GiB, or POOL=SIZE like cpu=8GiB")
    return budgets


def parse_size(text: str) -> int:
    """Return the bytes of a size like 8GiB. Raises Failure(INVALID)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise invalid(f"{text}: write a size like 8GiB or 500MB")
    return int(float(match[1]) * _UNITS[(match[2] or "B").lower()])


def check_memory(text: str | None, pools: Mapping[str, int], total: int) -> str:
    """Return a warning if all workers together may take more than `total` bytes; "" if not.

    Raises Failure(INVALID) for a size that is none, or a pool that is not one of `pools` (number of workers by name).
    """
    if text is None:
        return ""
    budgets = parse_memory(text)
    for pool in budgets:
        if pool not in pools and pool != EVERY_POOL:
            raise invalid(f"--memory {pool}=…: there is no pool {pool}; the pools are {', '.join(pools)}")
    together = sum(_budget(budgets, pool, total, sum(pools.values())) * number for pool, number in pools.items())
    if together <= total:
        return ""
    return (
        f"--memory {text}: all workers together may use {_gib(together)}, and this machine or container has "
        f"{_gib(total)}: the kernel ends workers when the memory runs out"
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB"


def worker_budget(text: str | None, pool: str, workers: int) -> int:
    """Return the memory of one worker of `pool` in bytes; 0: no limit.

    Args:
        text: as `parse_memory` takes it; None: an equal share.
        pool: the pool of the worker.
        workers: how many workers of all pools share the machine.
    """
    return _budget({} if text is None else parse_memory(text), pool, total_bytes(), workers)


def _budget(budgets: Mapping[str, int], pool: str, total: int, workers: int) -> int:
    for key in (pool, EVERY_POOL):
        if key in budgets:
            return budgets[key]
    return worker_share(total, workers)


def worker_share(total: int, workers: int) -> int:
    """Return the bytes of `total` that each of `workers` workers may use."""
    return max(WORKER_BYTES_MIN, int(total * WORKERS_SHARE) // max(1, workers))
