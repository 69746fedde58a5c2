"""The C library's allocator: it keeps freed memory until it is told to return it to the system."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

from millstream.services.process.c_library import c_library

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
