"""Bounds what the processes of a group take together: RLIMIT_DATA bounds the private memory of each one alone.

leader of the group ─> /proc: the processes of its group ─> memory of their own and shared, their number, their files
Linux only: elsewhere /proc is missing, and nothing is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from millstream.services.sandbox.folder_watch import FolderWatch

#: A compiler driver starts a preprocessor, a compiler proper, an assembler, a linker, and a shell for each.
PROCESSES_MAX = 64
_MEMORY = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", re.MULTILINE)
_PROC = Path("/proc")


class GroupWatch:
    """Bounds a group of processes and the folder that it writes to.

    Args:
        leader: the process that leads the group, which must not be reaped yet.
        folder: see `FolderWatch`.
        memory_bytes_max: resident memory of all processes together that no file backs; what they share counts for each.
        alone: whether the leader may start no others, so that the rest of /proc is not read.
    """

    def __init__(self, leader: int, folder: FolderWatch, memory_bytes_max: int, *, alone: bool) -> None:
        self._leader = leader
        self._folder = folder
        self._memory_bytes_max = memory_bytes_max
        self._alone = alone
        self._was_above = False

    def measure(self) -> str:
        """Return what exceeds a limit, for memory in two calls one after the other; empty: nothing does.

        Blocking, some milliseconds.
        """
        pids = [self._leader] if self._alone else list(_members(self._leader))
        if len(pids) > PROCESSES_MAX:
            return f"it started more than {PROCESSES_MAX} processes"
        # Seen twice: between fork and exec, what a process has counts for its child, too.
        above = sum(map(_memory_bytes, pids)) > self._memory_bytes_max
        if above and self._was_above:
            return f"its processes use more than {self._memory_bytes_max >> 20} MiB of memory together"
        self._was_above = above
        if any(self._folder.measure(pid) for pid in pids or [self._leader]):
            return self._folder.exceeded
        return ""


def _members(group: int) -> Iterator[int]:
    for status in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(status.read_text().rpartition(") ")[2].split()[2]) == group:
                yield int(status.parent.name)


def _memory_bytes(pid: int) -> int:
    with suppress(OSError):
        return sum(int(size) for size in _MEMORY.findall((_PROC / str(pid) / "status").read_text())) << 10
    return 0
