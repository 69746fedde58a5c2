"""The C library's allocator: it keeps what was freed, until it is told to give it back to the system."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

#: growth since memory was last given back that is worth the time it takes to give it back
GROWN_BYTES_MIN = 32 << 20
#: how often in a row a process must be found at rest
LOOKS_IDLE = 2
LOOKS_QUIET = 20
RETRIES = 3
RETRY_LOOKS = 4


def trim() -> None:
    """Give freed pages of all arenas back. May take 0.1 s for each GiB; other threads that allocate wait meanwhile."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:  # glibc only
        give_back(0)


def resident_bytes() -> int:
    """What this process takes of the machine's memory; 0 where that is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return 0
    return pages * mmap.PAGESIZE


class IdleTrim:
    """Decides when freed memory is given back: after each burst, when that is over. Pure.

    A library may free what it held some time after the burst. What is still resident then looks like memory in use, so
    that it is given back again at growing intervals: after RETRY_LOOKS looks, four times as many, and so on.
    """

    def __init__(self, resident: int) -> None:
        self._floor = resident
        self._idle = self._quiet = 0
        self._before_burst = resident
        self._retries = 0
        self._looks = self._retry_looks = 0

    def due(self, *, idle: bool, quiet: bool) -> bool:
        """Look once more. True: the process is at rest, and `grown` is worth asking.

        Args:
            idle: nothing is in flight.
            quiet: what is in flight takes little memory; then it takes ten times as many looks.
        """
        self._idle = self._idle + 1 if idle else 0
        self._quiet = self._quiet + 1 if quiet else 0
        self._looks += 1
        return self._idle >= LOOKS_IDLE or self._quiet >= LOOKS_QUIET

    def grown(self, resident: int) -> bool:
        """Return whether giving memory back is worth its time. If so, `trimmed` must follow."""
        self._floor = min(self._floor, resident)
        if resident >= self._floor + GROWN_BYTES_MIN:
            self._before_burst = self._floor
            self._retries, self._retry_looks = RETRIES, RETRY_LOOKS
            return True
        retry = bool(self._retries) and self._looks >= self._retry_looks
        if retry:
            self._retries, self._retry_looks = self._retries - 1, 4 * self._retry_looks
        return retry and resident >= self._before_burst + GROWN_BYTES_MIN

    def trimmed(self, resident: int) -> None:
        """It was given back; what is resident now is taken for memory in use."""
        self._floor = resident
        self._idle = self._quiet = self._looks = 0
