"""Bounds what a confined process takes, with those of its group: resource limits bound each one, and not all of it.

leader of the group ─> /proc: its processes ─> their number and threads, memory of their own and shared, their files
folder ─> all that it holds, and deleted files that a process has open or mapped: RLIMIT_FSIZE bounds each file alone
Linux only: elsewhere /proc is missing, and no process is found.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

#: a process that writes 1 GB/s gets so much further before it is measured again
WATCH_S = 0.25
#: files and folders; an archive may have 10,000 members
ENTRIES_MAX = 40_000
#: folders in each other; those of an archive are fewer, and the standard library walks more of them by recursion
DEPTH_MAX = 600
#: deleted files that a process has mapped; unless root asks, the kernel does not tell how large they are
MAPPED_MAX = 16
_BLOCK_BYTES = 512  # of st_blocks, inode(7)
#: a line of proc_pid_maps(5): a range of addresses, rights, offset, and the device and inode of a deleted file
_MAPPED = re.compile(
    r"^(?P<range>[0-9a-f]+-[0-9a-f]+) \S+ \S+ (?P<file>\S+ [1-9]\d*) +(?!/dev/zero)\S.* \(deleted\)$", re.MULTILINE
)


class MappedError(Exception):
    """A process maps more than MAPPED_MAX deleted files."""


class FolderWatch:
    """Bounds what a folder holds while a process writes to it.

    Args:
        folder: everything below it counts; None: there is none that it may write to.
        bytes_max: of all its files together, as the disk holds them: the holes of sparse files are free.
        included: what counts besides the files that the process wrote, for its owner.
    """

    def __init__(self, folder: Path | None, bytes_max: int, included: str = ", the uploaded ones included") -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._included = included
        #: what the process did that exceeds the limit, for its owner; empty: nothing yet
        self.exceeded = ""

    def measure(self, pid: int | None = None) -> bool:
        """Return whether the limit is exceeded, now or before. Blocking; reads names and sizes alone.

        `pid`: a running process, whose open and mapped files that are in no folder any more count, too.
        """
        if not self.exceeded:
            self.exceeded = self._excess(pid)
        return bool(self.exceeded)

    def _excess(self, pid: int | None) -> str:
        entries = size_bytes = 0
        try:
            for status in chain(_deleted(pid) if pid else (), _below(self._folder) if self._folder else ()):
                entries += 1
                size_bytes += status.st_blocks * _BLOCK_BYTES
                if size_bytes > self._bytes_max:
                    return f"its files take more than {self._bytes_max >> 20} MiB{self._included}"
                if entries > ENTRIES_MAX:
                    return f"it made more than {ENTRIES_MAX} files"
        except MappedError:
            return f"it maps more than {MAPPED_MAX} deleted files"
        except OSError:  # a folder that was made unreadable
            return "it made folders that cannot be listed"
        except RecursionError:
            return f"it made more than {DEPTH_MAX} folders in each other"
        return ""


def _below(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of every file and folder below `folder`.

    Raises OSError for a folder that cannot be listed, RecursionError for folders nested too deeply.
    """
    folders = [(str(folder), 0)]
    while folders:
        path, depth = folders.pop()
        if depth > DEPTH_MAX:
            raise RecursionError
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        folders.append((entry.path, depth + 1))
                    yield status


def _deleted(pid: int) -> Iterator[os.stat_result]:
    """Yield the status of the files that a process has open or mapped and that no folder lists, files in memory, too.

    Raises MappedError.
    """
    seen = set()
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    seen.add((status.st_dev, status.st_ino))
                    yield status
    maps = ""
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    mapped = {one["file"]: one["range"] for one in _MAPPED.finditer(maps)}
    if len(mapped) > MAPPED_MAX:
        raise MappedError
    for addresses in mapped.values():
        with suppress(OSError):
            status = Path(f"/proc/{pid}/map_files/{addresses}").stat()
            if (status.st_dev, status.st_ino) not in seen:
                yield status


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
        pids = self._pids()
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

    def memory_bytes(self) -> int:
        """Return the memory of all processes together that no file backs."""
        return sum(memory_bytes for _, memory_bytes in map(_taken, self._pids()))

    def _pids(self) -> list[int]:
        return _alone(self._leader) if self._alone else list(_members(self._leader))


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
