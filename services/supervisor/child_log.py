"""The lines that one child writes: all go to its log file; the rest depends on the log format.

text: warnings, errors and tracebacks -> terminal, prefixed with the child's name
JSON: every line as an object -> log file and standard output; lines that are none (Redis', a library's) become one
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from millstream.services.process.logs import json_line, json_record
from millstream.services.settings import LogFormat
from millstream.services.supervisor.log import Alerts, LogFile

ShowLine = Callable[[str], None]
WriteLine = Callable[[bytes], None]

_LEVEL = re.compile(r"\b(WARNING|ERROR|CRITICAL|FATAL)\b")


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
