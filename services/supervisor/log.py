"""What children say: every line goes to a file, warnings and errors also to the terminal.

child's stdout and stderr -> pipe -> LogFile (home/logs/<name>.log)
                                  -> Alerts -> terminal, prefixed with the child's name
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

from millstream.services.process.printable import printable

LOG_BYTES_MAX = 16 << 20
KEPT = 3
LINE_BYTES_MAX = 64 << 10
ALERTS_MAX = 100
ALERTS_S = 60.0

_LEVEL = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL)\b")
_TRACEBACK = "Traceback (most recent call last)"


class LogFile:
    """A file that only grows to LOG_BYTES_MAX; the last KEPT ones are `<name>.log.1`, `.2`, `.3`.

    Raises nothing: a disk that is full, or a folder that went away, costs lines and stops nobody who logs. How many were
    lost is the first line when writing works again.
    """

    def __init__(self, path: Path, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.path = path
        self.lost = 0  # lines since one was written last
        self._bytes_max = bytes_max
        self._file: io.FileIO | None = None
        self._try(lambda: None)

    def write(self, line: bytes) -> None:
        if not self._try(lambda: self._append(line)):
            self.lost += 1

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _try(self, action: Callable[[], None]) -> bool:
        """Whether it worked, with a file that is open and has room."""
        try:
            if self._file is None or self._file.tell() >= self._bytes_max:
                self.close()
                self._rotate_if_full()
                self._file = io.FileIO(self.path, "ab")
            action()
        except OSError:
            self.close()
            return False
        return True

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        if self.lost:
            line = b"(%d lines before this one could not be written)\n" % self.lost + line
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.lost = 0

    def _rotate_if_full(self) -> None:
        if not self.path.exists() or self.path.stat().st_size < self._bytes_max:
            return
        for number in range(KEPT, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)


class Alerts:
    """Which lines are worth the terminal: those that name a level from WARNING up, and tracebacks whole.

    At most ALERTS_MAX in ALERTS_S seconds: what the terminal's output is kept in must not grow with every request.
    """

    def __init__(self) -> None:
        self._in_traceback = False
        self._window_start_s = float("-inf")
        self._shown = 0

    def new_process(self) -> None:
        """The lines from now on are another process'; the one before may have died within a traceback."""
        self._in_traceback = False

    def shown(self, line: str, now_s: float) -> str | None:
        """What to show for `line`, given the lines before it; None: nothing. The terminal obeys nothing in it."""
        if not self._worth(line):
            return None
        if now_s - self._window_start_s >= ALERTS_S:
            self._window_start_s, self._shown = now_s, 0
        self._shown += 1
        if self._shown == ALERTS_MAX:
            return f"more than {ALERTS_MAX - 1} warnings within {ALERTS_S:g} s: the next ones are in its log alone"
        return printable(line.replace("\t", " ")) if self._shown < ALERTS_MAX else None

    def _worth(self, line: str) -> bool:
        if self._in_traceback:
            # A traceback's frames are indented; its last line, the exception, is not.
            self._in_traceback = line.startswith((" ", "\t")) or not line.strip()
            return True
        if line.startswith(_TRACEBACK):
            self._in_traceback = True
            return True
        return bool(_LEVEL.search(line))
