"""The log of the supervisor itself: home/logs/supervisor.log, and with JSON standard output.

logging -> OwnLog -> LogFile
                  -> JSON: LineWriter -> standard output, where the lines of all children go, too
                  -> text: warnings that are not about the installation -> standard error
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from millstream.services.process.logs import (
    JsonFormatter,
    LineHandler,
    TextFormatter,
    bounded_writer,
    json_line,
    json_record,
)
from millstream.services.settings import LogFormat
from millstream.services.supervisor.log import LogFile, WriteLine

NAME = "supervisor"
#: the logger of what happens to the installation, which the view shows as well
LOGGER = "millstream.supervisor"
#: lines that wait while the reader of standard output is slow; further ones are lost on it, not in the log files
LINES_WAITING_MAX = 10_000
CLOSE_S_MAX = 2.0


class OwnLog:
    """Receives this process' log records from `open` until `close`.

    Args:
        path: the log file.
        log_format: form of the lines.
        forward: takes every line of JSON; None: they are in the file only.
    """

    def __init__(self, path: Path, log_format: LogFormat, forward: WriteLine | None) -> None:
        self._file = LogFile(path)
        formatter = JsonFormatter(NAME) if log_format == "json" else TextFormatter()
        file = LineHandler(self._file.write)
        other = LineHandler(forward or bounded_writer(2, formatter))
        if forward is None:
            # What the supervisor itself says is shown by its view.
            other.addFilter(lambda record: record.levelno >= logging.WARNING and record.name != LOGGER)
        self._handlers = [file, other]
        for handler in self._handlers:
            handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith("millstream."))
            handler.setFormatter(formatter)

    def open(self) -> None:
        """Receive records from now on."""
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        for handler in self._handlers:
            root.addHandler(handler)

    def close(self) -> None:
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
        self._file.close()


class LineWriter:
    """Writes lines from a thread, so that a reader that stalls does not stall the supervisor.

    Args:
        write: writes a line, may block, and does not raise.
        lines_max: lines that may wait.
        lost: makes the line that says how many lines were lost.
    """

    def __init__(
        self,
        write: WriteLine,
        lines_max: int = LINES_WAITING_MAX,
        lost: Callable[[int], bytes] | None = None,
    ) -> None:
        self._write_line = write
        self._lost_line = lost or _lost_line
        self._lines_max = lines_max
        self._lines: deque[bytes] = deque()
        self._lost = 0
        self._added = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log lines", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Write a line later. If too many lines wait, it is counted instead; never raises."""
        with self._added:
            if self._closed or len(self._lines) >= self._lines_max:
                self._lost += 1
                return
            if self._lost:
                self._lines.append(self._lost_line(self._lost))
                self._lost = 0
            self._lines.append(line)
            self._added.notify()

    def close(self) -> None:
        """Wait until the lines are written, for at most CLOSE_S_MAX, and end the thread."""
        with self._added:
            self._closed = True
            self._added.notify()
        self._thread.join(CLOSE_S_MAX)

    def _run(self) -> None:
        while True:
            with self._added:
                while not self._lines and not self._closed:
                    self._added.wait()
                if not self._lines:
                    return
                waiting = self._lines.popleft()
            self._write_line(waiting)


def _lost_line(lost: int) -> bytes:
    record = json_record("WARNING", LOGGER, NAME, os.getpid(), time.time())  # noqa: TID251 - for people
    message = f"{lost} lines are only in the log files: standard output was not read"
    return json_line(record | {"message": message}).encode() + b"\n"
