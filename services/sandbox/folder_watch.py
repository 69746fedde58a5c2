"""Ends a confined process whose files take too much of the disk: RLIMIT_FSIZE bounds each file, and not their sum.

process ─> every WATCH_S: files of its folder, and deleted files that it has open or mapped ─> over the limit?
"""

from __future__ import annotations

import os
import re
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
