"""Handles the output of children: every line goes to a file, warnings and errors also to the terminal.

child's stdout and stderr -> pipe -> ChildLog -> LogFile (home/logs/<name>.log)
                                              -> text: Alerts -> terminal, prefixed with the child's name
                                              -> JSON: every line as an object -> standard output
the supervisor's own records -> SupervisorLog -> home/logs/supervisor.log, with JSON also standard output
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millstream.services.process.logs import json_line, json_record
from millstream.services.process.printable import printable
from millstream.services.settings import LogFormat

#: size after which a log file is rotated, and how many rotated files are kept
LOG_BYTES_MAX = 16 << 20
ROTATED_FILES = 3
LINE_BYTES_MAX = 64 << 10
MOVED_S = 1.0  # between two checks whether another program moved or removed a log file
#: lines of one child on the terminal within ALERTS_S; further ones appear in the log only
ALERTS_MAX = 100
ALERTS_S = 60.0

_LEVEL = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL)\b")
ACCESS_SUFFIX = "-access"  # of the name of a gateway's access log
_TRACEBACK = "Traceback (most recent call last)"

ShowLine = Callable[[str], None]
WriteLine = Callable[[bytes], None]


class LogFile:
    """A log file that is rotated at LOG_BYTES_MAX to `<name>.log.1`, `.2`, `.3`.

    Never raises: on a full disk or in a removed folder, lines are lost and the process continues. When writing works
    again, the first line says how many lines were lost. A file that another program moved is opened anew.
    """

    def __init__(self, path: Path, *, bytes_max: int = LOG_BYTES_MAX) -> None:
        self.path = path
        self.lost = 0  # lines lost since the last write that succeeded
        self._bytes_max = bytes_max
        self._file: io.FileIO | None = None
        self._check_at = 0.0
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
        """Open or rotate the file if needed, then run `action`; return whether that succeeded."""
        try:
            if self._file is None or self._file.tell() >= self._bytes_max or self._moved(self._file):
                self.close()
                self._rotate_if_full()
                self._file = io.FileIO(self.path, "ab")
            action()
        except OSError:
            self.close()
            return False
        return True

    def _moved(self, file: io.FileIO) -> bool:
        """Return whether another program moved or removed the file, as logrotate does."""
        now = time.monotonic()
        if now < self._check_at:
            return False
        self._check_at = now + MOVED_S
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
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
        for number in range(ROTATED_FILES, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)


class Alerts:
    """Selects the lines to show on the terminal: those with a level from WARNING up, and whole tracebacks.

    At most ALERTS_MAX in ALERTS_S seconds, so that a journal that stores the terminal's output stays bounded.
    """

    def __init__(self) -> None:
        self._in_traceback = False
        self._indented = False  # whether all lines of the traceback are, as in our processes' logs
        self._window_start_s = float("-inf")
        self._shown = 0

    def new_process(self) -> None:
        """Start over for the lines of a new process; the previous one may have died inside a traceback."""
        self._in_traceback = False

    def line_to_show(self, line: str, now_s: float) -> str | None:
        """Return the text to show for `line`, without control characters; None to show nothing.

        Depends on the lines before it.
        """
        if not self._is_alert(line):
            return None
        if now_s - self._window_start_s >= ALERTS_S:
            self._window_start_s, self._shown = now_s, 0
        self._shown += 1
        if self._shown == ALERTS_MAX:
            return f"more than {ALERTS_MAX - 1} warnings within {ALERTS_S:g} s: further ones are only in its log"
        return printable(line.replace("\t", " ")) if self._shown < ALERTS_MAX else None

    def _is_alert(self, line: str) -> bool:
        if self._in_traceback:
            # A traceback's frames are indented; its last line, the exception, is not unless all lines are.
            self._in_traceback = line.startswith((" ", "\t")) or not line.strip()
            if self._in_traceback or not self._indented:
                return True
        if line.lstrip(" ").startswith(_TRACEBACK):
            self._in_traceback, self._indented = True, line.startswith(" ")
            return True
        return bool(_LEVEL.search(line))


class ChildLog:
    """Takes the lines of a child.

    Args:
        name: name of the child.
        file: its log file.
        log_format: in which form its lines are written.
        show_line: shows a line on the terminal.
        forward: takes every line of JSON, with its line break; None: the lines are in the log file only.
    """

    def __init__(
        self, name: str, file: LogFile, log_format: LogFormat, show_line: ShowLine, forward: WriteLine | None
    ) -> None:
        self._name = name
        self._file = file
        self._json = log_format == "json"
        self._show_line = show_line
        self._forward = forward
        self._alerts = Alerts()
        self._quiet = name == "redis"  # it logs advice about the machine as warnings at every start

    def new_process(self) -> None:
        """Start over for the lines of a new process."""
        self._alerts.new_process()

    def write(self, line: bytes, pid: int, now_s: float) -> str:
        """Take a line without its line break, and return its text. `now_s`: monotonic time."""
        if self._json:
            document = _document(line)
            if document is None:
                document = self._wrapped(line, pid)
                line = json_line(document).encode()
            text, alert = str(document["message"]), self._alert_of(document, now_s)
        else:
            text = line.decode(errors="replace").rstrip()
            alert = None if self._quiet else self._alerts.line_to_show(text, now_s)
        self._file.write(line + b"\n")
        if self._forward is not None:
            self._forward(line + b"\n")
        elif alert is not None:
            self._show_line(f"{self._name}: {alert}")
        return text

    def close(self) -> None:
        self._file.close()

    def _wrapped(self, line: bytes, pid: int) -> dict[str, Any]:
        text = line.decode(errors="replace").rstrip()
        found = None if self._quiet else _LEVEL.search(text)
        level = found[1].replace("FATAL", "CRITICAL") if found else "INFO"
        return json_record(level, "output", self._name, pid, time.time()) | {"message": text}  # noqa: TID251 - for people

    def _alert_of(self, document: dict[str, Any], now_s: float) -> str | None:
        level = logging.getLevelNamesMapping().get(str(document.get("level")), logging.INFO)
        if level < logging.WARNING or self._quiet:
            return None
        return self._alerts.line_to_show(f"{document['level']} {document.get('logger')}: {document['message']}", now_s)


def _document(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line that one of our processes logged; None for any other line."""
    if not line.startswith(b"{"):
        return None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if {"time", "level", "message"} <= document.keys() else None
