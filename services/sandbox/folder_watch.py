"""Ends a confined process whose files take too much of the disk: RLIMIT_FSIZE bounds each file, and not their sum.

process ─> every WATCH_S: files of its folder, and deleted files that it has open ─> over the limit? ─> it is killed
"""

from __future__ import annotations

import asyncio
import os
import stat
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
_BLOCK_BYTES = 512  # of st_blocks, inode(7)


class FolderWatch:
    """Bounds what a folder holds while a process writes to it.

    Args:
        folder: everything below it counts.
        bytes_max: of all its files together, as the disk holds them: the holes of sparse files are free.
        included: what counts besides the files that the process wrote, for its owner.
    """

    def __init__(self, folder: Path, bytes_max: int, included: str = ", the uploaded ones included") -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._included = included
        #: what the process did that exceeds the limit, for its owner; empty: nothing yet
        self.exceeded = ""

    async def until_exceeded(self, pid: int) -> None:
        """Return when the limit is exceeded by the process `pid`."""
        while not await asyncio.to_thread(self.measure, pid):
            await asyncio.sleep(WATCH_S)

    def measure(self, pid: int | None = None) -> bool:
        """Return whether the limit is exceeded, now or before. Blocking; reads names and sizes alone.

        `pid`: a running process, whose open files that are in no folder any more count, too.
        """
        if not self.exceeded:
            self.exceeded = self._excess(pid)
        return bool(self.exceeded)

    def _excess(self, pid: int | None) -> str:
        entries = size_bytes = 0
        try:
            for status in chain(_deleted(pid) if pid else (), _below(self._folder)):
                entries += 1
                size_bytes += status.st_blocks * _BLOCK_BYTES
                if size_bytes > self._bytes_max:
                    return f"its files take more than {self._bytes_max >> 20} MiB{self._included}"
                if entries > ENTRIES_MAX:
                    return f"it made more than {ENTRIES_MAX} files"
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
    """Yield the status of the files that a process has open and that no folder lists, files in memory among them."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    yield status
