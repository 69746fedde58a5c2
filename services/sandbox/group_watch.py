"""Bounds what a confined process takes, with those of its group: resource limits bound each one, and not all of it.

leader of the group ─> /proc: its processes ─> their number and threads, memory of their own and shared, their files
Linux only: elsewhere /proc is missing, and nothing is found.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from millstream.services.sandbox.folder_watch import WATCH_S, FolderWatch

#: A compiler driver starts a preprocessor, a compiler proper, an assembler, a linker, and a shell for each.
PROCESSES_MAX = 64
#: of all processes together; a library starts one or two for each core, and RLIMIT_NPROC does not bind root
THREADS_MAX = 1024
_THREADS = re.compile(r"^Threads:\s*(\d+)$", re.MULTILINE)
_MEMORY = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", re.MULTILINE)
_PROC = Path("/proc")


class GroupWatch:
    """Bounds a group of processes and the folder that it writes to.

    Args:
        leader: the process that leads the group, which must not be reaped yet.
        folder: see `FolderWatch`.
        memory_bytes_max: resident memory of all processes together that no file backs; what they share counts for each.
        alone: whether the leader may start no others but the one that it waits for (`namespaces.enter`), so that the
            rest of /proc is not read.
    """

    def __init__(self, leader: int, folder: FolderWatch, memory_bytes_max: int, *, alone: bool) -> None:
        self._leader = leader
        self._folder = folder
        self._memory_bytes_max = memory_bytes_max
        self._alone = alone
        self._was_above = False
        self._next = time.monotonic() + WATCH_S

    @property
    def due(self) -> bool:
        """Whether WATCH_S have passed since the last `measure`, for processes that answer before it is time to look."""
        return time.monotonic() >= self._next

    async def until_exceeded(self) -> str:
        """Return what exceeds a limit, when something does. It looks after WATCH_S first, when most have ended."""
        while True:
            await asyncio.sleep(WATCH_S)
            if exceeded := await asyncio.to_thread(self.measure):
                return exceeded

    def measure(self) -> str:
        """Return what exceeds a limit, for memory in two calls one after the other; empty: nothing does.

        Blocking, some milliseconds.
        """
        self._next = time.monotonic() + WATCH_S
        pids = _alone(self._leader) if self._alone else list(_members(self._leader))
        if len(pids) > PROCESSES_MAX:
            return f"it started more than {PROCESSES_MAX} processes"
        taken = [_taken(pid) for pid in pids]
        if sum(threads for threads, _ in taken) > THREADS_MAX:
            return f"it started more than {THREADS_MAX} threads"
        # Seen twice: between fork and exec, what a process has counts for its child, too.
        above = sum(memory_bytes for _, memory_bytes in taken) > self._memory_bytes_max
        if above and self._was_above:
            return f"its processes use more than {self._memory_bytes_max >> 20} MiB of memory together"
        self._was_above = above
        if any(self._folder.measure(pid) for pid in pids or [self._leader]):
            return self._folder.exceeded
        return ""


def _alone(leader: int) -> list[int]:
    """Return the leader, and the child that does its work in namespaces."""
    children: list[int] = []
    with suppress(OSError):
        children = [int(pid) for pid in (_PROC / str(leader) / "task" / str(leader) / "children").read_text().split()]
    return [leader, *children]


def _members(group: int) -> Iterator[int]:
    for status in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            if int(status.read_text().rpartition(") ")[2].split()[2]) == group:
                yield int(status.parent.name)


def _taken(pid: int) -> tuple[int, int]:
    """Return the threads of a process, and its memory in bytes that no file backs."""
    with suppress(OSError):
        status = (_PROC / str(pid) / "status").read_text()
        threads = _THREADS.search(status)
        return int(threads[1]) if threads else 0, sum(int(size) for size in _MEMORY.findall(status)) << 10
    return 0, 0
