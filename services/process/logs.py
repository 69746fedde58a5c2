"""Log records -> lines, in every process: text on standard error, or one JSON object a line on standard output.

log.info("loaded", extra=about(model, version=3)) -> TextFormatter | JsonFormatter -> LineHandler -> descriptor
Logged values may come from requests: control characters are escaped, so that no value can forge a line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

from millstream.services.process.printable import printable
from millstream.services.process.request_id import REQUEST_ID, TRACE
from millstream.services.traceparent import trace_id_of

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Characters of a message, of a traceback and of one field; what is longer loses its middle. A line of JSON then stays
#: below the length at which the supervisor splits lines (supervisor/log.py), unless most characters are escaped.
MESSAGE_MAX, TRACEBACK_MAX, FIELD_MAX = 4096, 8192, 512
#: bytes of a JSON line beyond which its texts are cut further
JSON_BYTES_MAX = 60_000

_LEVEL_NAMES = frozenset({"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})


STALL_S_MAX = 0.1  # for a reader that is slow, once: while it does not read, further lines wait for nothing


class BoundedWriter:
    """Writes lines to one descriptor. Not thread-safe: a log handler has a lock.

    Args:
        fd: the descriptor. It stays blocking: others may share its file, a terminal for instance.
        dropped: makes the line that says how many lines were dropped.
    """

    def __init__(self, fd: int, dropped: Callable[[int], bytes]) -> None:
        self._fd = fd
        self._dropped_line = dropped
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._dropped = 0
        self._cut = False  # whether the reader has only a part of the last line

    def write(self, line: bytes) -> None:
        """Write a line, or count it as dropped. Never raises: a reader may have closed its end."""
        try:
            if self._dropped:
                if not self._takes(0):
                    self._dropped += 1
                    return
                said, self._dropped = self._dropped, 0
                if not self._put((b"\n" if self._cut else b"") + self._dropped_line(said)):
                    self._dropped += said + 1
                    return
            if not self._put(line):
                self._dropped += 1
        except OSError:
            return

    def _put(self, data: bytes) -> bool:
        """Write all of `data`; False: its reader stalled, and has a part of it or none."""
        self._cut, rest = False, memoryview(data)
        while rest:
            if not self._takes(STALL_S_MAX):
                self._cut = len(rest) < len(data)
                return False
            rest = rest[os.write(self._fd, rest[: select.PIPE_BUF]) :]
        return True

    def _takes(self, seconds: float) -> bool:
        """Whether the descriptor takes bytes now, or within some seconds; also if a write would fail."""
        return bool(self._poll.poll(seconds * 1000))


def about(model: str | None = None, **fields: object) -> dict[str, Any]:
    """Return the `extra` of a log call: the model that the record is about, and values for programs that read logs."""
    return {"model": model, "fields": fields}


def configure_logs(log_format: str, process: str) -> None:
    """Send this process' log records to standard error as text, or to standard output as JSON.

    With JSON, warnings of Python and exceptions that end a thread or the process are records, too.
    """
    formatter: logging.Formatter = JsonFormatter(process) if log_format == "json" else TextFormatter()
    handler = LineHandler(bounded_writer(1 if log_format == "json" else 2, formatter))
    handler.setFormatter(formatter)
    if log_format == "json":
        _log_uncaught_exceptions()
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def exit_message(message: str) -> None:
    """Say why this process ends: one line on standard error, with JSON a record on standard output."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger("millstream.process").critical("%s", message)
    else:
        print(f"error: {printable(message)}", file=sys.stderr)


class LineHandler(logging.Handler):
    """Writes each record as one line with `write`, which must not raise."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)  # arguments that do not fit the message: a defect
        else:
            self._write(line + b"\n")


def bounded_writer(fd: int, formatter: logging.Formatter) -> Callable[[bytes], None]:
    """Return a function that writes lines to `fd` 1 or 2, and drops and counts those that its reader does not take."""

    def dropped(count: int) -> bytes:
        message = "%d log lines were dropped: they were not read in time"
        record = logging.LogRecord("millstream.process", logging.WARNING, __file__, 0, message, (count,), None)
        return formatter.format(record).encode() + b"\n"

    return BoundedWriter(fd, dropped).write if _is_open(fd) else lambda _: None


def _is_open(fd: int) -> bool:
    """Whether `fd` 1 or 2 was open at the start. One that was not may be that of a socket now."""
    return (sys.stdout if fd == 1 else sys.stderr) is not None


def descriptor_writer(fd: int) -> Callable[[bytes], None]:
    """Return a function that writes bytes to `fd` 1 or 2, and waits for its reader. It never raises."""
    if not _is_open(fd):
        return lambda _: None

    def write(line: bytes) -> None:
        try:
            while line:
                line = line[os.write(fd, line) :]
        except OSError:
            return

    return write


class TextFormatter(logging.Formatter):
    """Formats a record as LINE and the id of the request it is about; a traceback follows on indented lines."""

    def __init__(self, *, iso8601: bool = False) -> None:
        """Build one. `iso8601`: write times as 2026-01-31T12:00:00.000Z."""
        super().__init__(LINE)
        self._iso8601 = iso8601

    def format(self, record: logging.LogRecord) -> str:
        cached, record.exc_text = record.exc_text, None  # another formatter's, which is not indented
        try:
            return super().format(record)
        finally:
            record.exc_text = cached

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        if not self._iso8601:
            return super().formatTime(record, datefmt)
        at = datetime.fromtimestamp(record.created, timezone.utc)
        return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(shortened(record.message, MESSAGE_MAX))
        request_id = REQUEST_ID.get()
        trace = f", trace {trace_id}" if (trace_id := trace_id_of(TRACE.get())) else ""
        suffix = f" (request {printable(request_id)}{trace})" if request_id else ""
        return super().formatMessage(record) + suffix

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        # Indented, since an exception's message may contain line breaks and the text of a log line after them.
        lines = shortened(super().formatException(ei), TRACEBACK_MAX).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object in ASCII: time, level, logger, message, process, pid.

    Where they are known also request_id, trace_id, model, fields and exception (a traceback).
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        document = json_record(record.levelname, record.name, self._process, record.process or 0, record.created)
        document["message"] = shortened(record.getMessage(), MESSAGE_MAX)
        if request_id := REQUEST_ID.get():
            document["request_id"] = request_id
        if trace_id := trace_id_of(TRACE.get()):
            document["trace_id"] = trace_id
        if model := getattr(record, "model", None):
            document["model"] = shortened(str(model), FIELD_MAX)
        if fields := getattr(record, "fields", None):
            document["fields"] = {name: _field(value) for name, value in fields.items()}
        if record.exc_info:
            document["exception"] = shortened(self.formatException(record.exc_info), TRACEBACK_MAX)
        return json_line(document)


def json_record(level: str, logger: str, process: str, pid: int, created: float) -> dict[str, Any]:
    """Return the fields that all JSON lines have, in order; `message` is still empty. `created`: Unix time."""
    at = datetime.fromtimestamp(created, timezone.utc)
    return {
        "time": f"{at:%Y-%m-%dT%H:%M:%S.%f}Z",
        "level": level if level in _LEVEL_NAMES else "INFO",
        "logger": logger,
        "message": "",
        "process": process,
        "pid": pid,
    }


def json_line(document: dict[str, Any]) -> str:
    """Return `document` as one line of at most JSON_BYTES_MAX bytes: its long texts are cut until it fits."""
    limit = TRACEBACK_MAX
    while True:
        line = json.dumps({name: _well_formed(value) for name, value in document.items()})
        if len(line) <= JSON_BYTES_MAX or limit < 64:
            return line
        limit //= 2
        document = {
            name: shortened(value, limit) if isinstance(value, str) else value for name, value in document.items()
        }
        if len(str(document.get("fields", ""))) > JSON_BYTES_MAX // 8:
            document["fields"] = {"left_out": "too long"}


def shortened(text: str, characters_max: int) -> str:
    """Return `text` with at most about `characters_max` characters: its middle is left out."""
    if len(text) <= characters_max:
        return text
    half = characters_max // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def _field(value: object) -> object:
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return shortened(str(value), FIELD_MAX)


def _well_formed(value: Any) -> Any:
    """Replace lone surrogates, which strict readers of JSON refuse."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_well_formed(name): _well_formed(inner) for name, inner in value.items()}
    return value


def _log_uncaught_exceptions() -> None:
    logging.captureWarnings(capture=True)
    log = logging.getLogger("millstream.process")

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))

    def in_thread(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is not None and not isinstance(error, SystemExit):
            hook(arguments.exc_type, error, arguments.exc_traceback)

    sys.excepthook = hook
    threading.excepthook = in_thread
