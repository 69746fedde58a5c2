"""What children say: every line goes to a file, warnings and errors also to the terminal.

child's stdout and stderr -> pipe -> LogFile (home/logs/<name>.log)
                                  -> Alerts -> terminal, prefixed with the child's name
"""

from __future__ import annotations

import re
from pathlib import Path

LOG_BYTES_MAX = 16 << 20
KEPT = 3
LINE_BYTES_MAX = 64 << 10

_LEVEL = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL)\b")
_TRACEBACK = "Traceback (most recent call last)"


class LogFile:
    """A file that only grows to LOG_BYTES_MAX; the last KEPT ones are `<name>.log.1`, `.2`, `.3`."""

    def __init__(self, path: Path, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._rotate_if_full()
        self._file = path.open("ab", buffering=0)

    def write(self, line: bytes) -> None:
        self._file.write(line)
        if self._file.tell() >= self._bytes_max:
            self._file.close()
            self._rotate_if_full()
            self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def _rotate_if_full(self) -> None:
        if not self.path.exists() or self.path.stat().st_size < self._bytes_max:
            return
        for number in range(KEPT, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)


class Alerts:
    """Which lines are worth the terminal: those that name a level from WARNING up, and tracebacks whole."""

    def __init__(self) -> None:
        self._in_traceback = False

    def worth(self, line: str) -> bool:
        """Whether to show `line`, given the lines before it."""
        if self._in_traceback:
            # A traceback's frames are indented; its last line, the exception, is not.
            self._in_traceback = line.startswith((" ", "\t")) or not line.strip()
            return True
        if line.startswith(_TRACEBACK):
            self._in_traceback = True
            return True
        return bool(_LEVEL.search(line))
