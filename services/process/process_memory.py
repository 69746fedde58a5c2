"""The memory of this process: what the kernel counts, and what the C library's allocator keeps of it."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path
from typing import NamedTuple

from millstream.services.process.c_library import c_library

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


#: Least growth since the last trim: less is not worth the time of a trim.
GROWN_BYTES_MIN = 32 << 20
#: Number of consecutive checks that must find the process idle, or quiet.
CHECKS_IDLE = 2
CHECKS_QUIET = 20
RETRIES = 3  # further trims after a burst
_M_ARENA_MAX = -8
RETRY_CHECKS = 4  # checks before the first further trim


def trim() -> None:
    """Collect reference cycles, then return freed pages of all arenas.

    Calls that were cancelled leave cycles of their errors and frames, which hold whole replies; between bursts hardly
    anything is allocated, so that the collector would not run by itself. May take 0.1 s per GiB, during which other
    threads cannot allocate.
    """
    gc.collect()
    return_freed()


def return_freed() -> None:
    """Return freed pages of all arenas. Other threads run meanwhile, unless they allocate.

    Beside traffic this is to be used instead of `trim`: collecting cycles stops all threads for milliseconds.
    """
    malloc_trim = getattr(c_library(), "malloc_trim", None)
    if malloc_trim is not None:  # glibc only
        malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return 0
    return pages * mmap.PAGESIZE


def use_one_arena() -> None:
    """Let all threads allocate from the main arena; to be called before any thread is started.

    The top of every other arena stays resident when it is freed, which malloc_trim does not change: each load, in a
    thread of its own, would leave up to 64 MB behind. Source: mallopt(3), M_ARENA_MAX; glibc, malloc.c, mtrim.
    """
    mallopt = getattr(c_library(), "mallopt", None)
    if mallopt is not None:  # glibc only
        mallopt(_M_ARENA_MAX, 1)


class IdleTrim:
    """Decides when to trim: after the end of each burst. Pure.

    A library may free memory some time after the burst. Until the next trim that memory looks as if it were in use, so
    the trim is repeated at growing intervals: after RETRY_CHECKS checks, after four times as many, and so on.
    """

    def __init__(self, resident: int) -> None:
        self._floor = resident
        self._idle = self._quiet = 0
        self._before_burst = resident
        self._retries = 0
        self._checks = self._retry_checks = 0

    def due(self, *, idle: bool, quiet: bool) -> bool:
        """Record a check; returns whether the process is idle for long enough to call `grown`.

        Args:
            idle: no request is in flight.
            quiet: the requests in flight take little memory; must hold for ten times as many checks as `idle`.
        """
        self._idle = self._idle + 1 if idle else 0
        self._quiet = self._quiet + 1 if quiet else 0
        self._checks += 1
        return self._idle >= CHECKS_IDLE or self._quiet >= CHECKS_QUIET

    def grown(self, resident: int) -> bool:
        """Return whether a trim is worth its time. If so, `trimmed` must follow."""
        self._floor = min(self._floor, resident)
        if resident >= self._floor + GROWN_BYTES_MIN:
            self._before_burst = self._floor
            self._retries, self._retry_checks = RETRIES, RETRY_CHECKS
            return True
        retry = bool(self._retries) and self._checks >= self._retry_checks
        if retry:
            self._retries, self._retry_checks = self._retries - 1, 4 * self._retry_checks
        return retry and resident >= self._before_burst + GROWN_BYTES_MIN

    def trimmed(self, resident: int) -> None:
        """Record a trim, after which `resident` bytes count as memory in use."""
        self._floor = resident
        self._idle = self._quiet = self._checks = 0
