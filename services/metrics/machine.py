"""The load of the machine, processors and memory, from /proc."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_STAT, _MEMINFO = Path("/proc/stat"), Path("/proc/meminfo")


class CpuTimes(NamedTuple):
    """Ticks of all processors since the machine started."""

    busy: int
    all: int


class MachineMemory(NamedTuple):
    """Bytes of the machine's memory."""

    total: int
    used: int  # not available to programs without swapping


def cpu_times() -> CpuTimes:
    """Return the ticks of all processors; zeros without /proc."""
    try:
        ticks = [int(field) for field in _STAT.read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return CpuTimes(0, 0)
    idle = sum(ticks[3:5])  # idle and iowait
    return CpuTimes(sum(ticks) - idle, sum(ticks))


def memory() -> MachineMemory:
    """Return the memory of the machine; zeros without /proc."""
    try:
        lines = (line.partition(":") for line in _MEMINFO.read_text().splitlines())
        kib = {name: int(value.split()[0]) for name, _, value in lines if value}
        return MachineMemory(kib["MemTotal"] * 1024, (kib["MemTotal"] - kib["MemAvailable"]) * 1024)
    except (OSError, ValueError, KeyError):
        return MachineMemory(0, 0)
