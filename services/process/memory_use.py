"""What the kernel counts as the memory of this process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_SMAPS = Path("/proc/self/smaps")
_RESET = Path("/proc/self/clear_refs")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")  # the first line of each mapping in smaps
_FIELDS = {
    "RssAnon": "anonymous",
    "RssFile": "file",
    "RssShmem": "shared",
    "VmSwap": "swapped",
    "VmData": "data",
    "VmHWM": "peak",
}
_THREADS = "Threads"


class MemoryUse(NamedTuple):
    """Bytes of this process. Source: proc_pid_status(5).

    Args:
        anonymous: resident memory of its own.
        file: resident pages of mapped files: libraries, and weights that are mapped.
        shared: resident pages of shared memory segments, which belong to gateways.
        swapped: memory of its own in the swap.
        data: private writable memory, resident or not, which RLIMIT_DATA limits.
        threads: number of threads.
        peak: most resident bytes of all kinds since `reset_peak`, or since the start.
    """

    anonymous: int = 0
    file: int = 0
    shared: int = 0
    swapped: int = 0
    data: int = 0
    threads: int = 0
    peak: int = 0

    @property
    def own_bytes(self) -> int:
        """What counts against the budget: everything but the gateways' segments."""
        return self.anonymous + self.file + self.swapped


def memory_use() -> MemoryUse:
    """Return the memory of this process, all 0 where the kernel does not tell. Takes about 10 us."""
    found: dict[str, int] = {}
    try:
        lines = _STATUS.read_bytes().decode("ascii", "replace").splitlines()
    except OSError:  # not Linux
        return MemoryUse()
    for line in lines:
        name, _, value = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(value.split()[0]) << 10
        elif name == _THREADS:
            found["threads"] = int(value)
    return MemoryUse(**found)


def own_bytes() -> int:
    """Return what counts against the budget of this process; 0 if unknown."""
    return memory_use().own_bytes


def reset_peak() -> bool:
    """Let `MemoryUse.peak` begin at the present use. False: the kernel does not allow it (proc_pid_clear_refs(5))."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def mapped_bytes(folder: Path) -> int:
    """Return the resident bytes of mapped files below `folder`."""
    prefix = f"{folder.absolute()}/"
    try:
        if prefix not in _MAPS.read_text(errors="replace"):  # nearly always; the other file takes far longer to write
            return 0
        lines = _SMAPS.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return 0
    total, inside = 0, False
    for line in lines:
        if _MAPPING.match(line):
            inside = prefix in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total
