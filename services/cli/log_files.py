"""Reads the log files of an installation from their ends, and what processes write to them afterwards.

home/logs/<process>.log, rotated to .log.1, .2, … (services/supervisor/log.py)
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path

from millstream.services.supervisor.log import ROTATED_FILES

BLOCK_BYTES = 64 << 10
#: read at once from a log that is followed
READ_BYTES = 4 << 20
#: A line without an end is cut here.
LINE_BYTES_MAX = 1 << 20

_LOG = re.compile(r"(.+)\.log(?:\.\d+)?")


def processes(folder: Path) -> list[str]:
    """Return the names of the processes that have a log in a folder, sorted; empty if there is none.

    Raises OSError if the folder exists, but cannot be read.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are all that is needed
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({match[1] for name in names if (match := _LOG.fullmatch(name))})


class ProcessLog:
    """The log of one process: first all that is in it, from its end, then what is written to it.

    Args:
        folder: of the log files.
        process: its name, that of the files.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self._path = folder / f"{process}.log"
        self._fd: int | None = None
        self._position = 0  # in the open file, behind the last line that was returned

    def lines_backwards(self) -> Generator[str, None, None]:
        """Yield all whole lines, the last one first. `new_lines` then continues behind the first line that this yields.

        Raises OSError if a file cannot be read.
        """
        self.close()
        opened = self._open_all()
        try:
            for number, fd in enumerate(opened):
                end = _end_of_lines(fd, os.fstat(fd).st_size)
                if number == 0:
                    self._fd, self._position = os.dup(fd), end
                for line in _lines_backwards(fd, end):
                    yield _text(line)
        finally:
            for fd in opened:
                os.close(fd)

    def new_lines(self) -> list[str]:
        """Return the whole lines written since the last call, also over a rotation. Raises OSError."""
        if self._fd is None and not self._open():
            return []
        assert self._fd is not None
        # Asked before reading: what was written before the rotation is read, and the new file in the next call.
        rotated = self._was_rotated()
        if os.fstat(self._fd).st_size < self._position:
            self._position = 0  # the file was emptied
        content = os.pread(self._fd, READ_BYTES, self._position)
        whole = content.rfind(b"\n") + 1
        if not whole and len(content) >= READ_BYTES:
            whole = len(content)
        self._position += whole
        if rotated and not whole:
            self.close()
            return self.new_lines() if self._open() else []
        return [_text(line) for line in content[:whole].split(b"\n")[:-1]]

    def close(self) -> None:
        """Close the open file; a next call begins with the first line of the current one."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._position = None, 0

    def _open(self) -> bool:
        try:
            self._fd, self._position = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), 0
        except FileNotFoundError:
            return False
        return True

    def _open_all(self) -> list[int]:
        """Open the current file and the rotated ones, newest first; a file that is rotated meanwhile only once."""
        opened: dict[tuple[int, int], int] = {}
        for suffix in ("", *(f".{number}" for number in range(1, ROTATED_FILES + 1))):
            try:
                fd = os.open(f"{self._path}{suffix}", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) in opened:
                os.close(fd)
            else:
                opened[status.st_dev, status.st_ino] = fd
        return list(opened.values())

    def _was_rotated(self) -> bool:
        assert self._fd is not None
        opened = os.fstat(self._fd)
        try:
            current = self._path.stat()
        except FileNotFoundError:
            return False
        return (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")


def _end_of_lines(fd: int, size: int) -> int:
    """Return the position behind the last line end; `size` for a file without one near its end."""
    start = max(0, size - LINE_BYTES_MAX)
    return start + end if (end := os.pread(fd, size - start, start).rfind(b"\n") + 1) else size


def _lines_backwards(fd: int, end: int) -> Iterator[bytes]:
    """Yield the lines before the position `end`, the last one first."""
    rest = b""
    position = end
    while position > 0:
        start = max(0, position - BLOCK_BYTES)
        first, *lines = (os.pread(fd, position - start, start) + rest).split(b"\n")
        if position == end and lines and not lines[-1]:
            lines.pop()  # behind the last line end there is no line
        yield from reversed(lines)
        position, rest = start, first
        if len(rest) > LINE_BYTES_MAX:
            yield rest
            rest = b""
    if end:
        yield rest
