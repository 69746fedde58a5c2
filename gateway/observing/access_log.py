"""A line for each finished request, written by a thread. Off by default.

add (event loop): a reference ─> buffer (bounded) ─> thread: lines ─> file with a size limit, or standard output
A disk or a reader that is slow costs lines, which are counted, and never a request. No line has a tensor, a header or
the query of a URL, which may hold keys.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from itertools import islice
from typing import Any

from millstream.gateway.observing.finished import Finished, Run
from millstream.services.metrics.catalogue import ACCESS_LINES_DROPPED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.logs import json_line, json_record
from millstream.services.process.printable import printable
from millstream.services.supervisor.log import LogFile
from millstream.services.traceparent import trace_id_of

LOGGER = "millstream.access"
WAITING_MAX = 16_384  # finished requests that wait for their line; further ones are counted instead
BLOCK_MAX = 128  # lines of one write: making more would hold the interpreter's lock for long
WRITE_S = 0.2  # delay of a line
CLOSE_S_MAX = 2.0  # time for what waits when the gateway stops
_LARGEST = 1e6  # a worker may say anything, and JSON has no infinity
_TEXT_MAX = 512  # characters of a value that a caller chose
#: names of gRPC's status codes, by number. Source: gRPC, doc/statuscodes.md
_GRPC = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)

Write = Callable[[bytes], bool]
"""Writes lines; returns whether they were written. It may block, and must not raise."""


class AccessLog:
    """The access log of one gateway.

    `line`: makes the line of a request; the second argument is what Unix time is ahead of the request's clock.
    """

    def __init__(self, write: Write, line: Callable[[Finished, float], str], registry: MetricsRegistry) -> None:
        self.wants = None  # it takes all
        self.traces = False
        self._write = write
        self._line = line
        self._waiting: deque[Finished] = deque()
        # Each series is written by one thread.
        self._full = registry.counter(ACCESS_LINES_DROPPED, "buffer_full")
        self._unwritten = registry.counter(ACCESS_LINES_DROPPED, "write_failed")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: Finished) -> None:
        """Take a finished request. Called in the event loop."""
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append(request)
        else:
            self._full.add()

    def close(self) -> None:
        """Write what waits, for at most CLOSE_S_MAX, and end the thread. Blocks."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S_MAX)

    def _run(self) -> None:
        while not self._closing.wait(WRITE_S):
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        offset = time.time() - time.monotonic()  # noqa: TID251 - for people
        while self._waiting:
            taken = [self._waiting.popleft() for _ in islice(range(len(self._waiting)), BLOCK_MAX)]
            block = "".join(f"{self._line(request, offset)}\n" for request in taken)
            if not self._write(block.encode("utf-8", "backslashreplace")):
                self._unwritten.add(len(taken))


def block_writer(file: LogFile) -> Write:
    """Return a function that appends to a log file. The file says how many blocks of lines are missing in it."""

    def write(block: bytes) -> bool:
        file.write(block)
        return not file.lost

    return write


def stdout_writer() -> Write:
    """Return a function that writes to standard output; lines are lost if its reader closed it, or its disk is full."""
    # A descriptor that was closed at the start may be that of a socket now.
    if sys.stdout is None:
        return lambda _: False

    def write(block: bytes) -> bool:
        try:
            while block:
                block = block[os.write(1, block) :]
        except OSError:
            return False
        return True

    return write


def text_line(request: Finished, offset: float) -> str:
    """Return the line of a request for people, as log lines are."""
    at = datetime.fromtimestamp(request.ended + offset)
    run = request.runs[0] if request.runs else None
    served = "" if run is None else f" {run.model}:{run.version} rows {run.rows}"
    trace_id = trace_id_of(request.trace)
    ids = f"request {request.request_id or '-'}" + (f", trace {trace_id}" if trace_id else "")
    ids += f", key {request.key}" if request.key else ""
    return printable(
        f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03} INFO {LOGGER}: {request.client or '-'} "
        f'"{_called(request)}" {_status(request)} {request.reply_bytes} bytes '
        f"{(request.ended - request.started) * 1000:.3f} ms{served} ({ids})"
    )


def json_text(process: str) -> Callable[[Finished, float], str]:
    """Return the function that returns the line of a request as a JSON object. `process`: name of this process."""

    def line(request: Finished, offset: float) -> str:
        document = json_record("INFO", LOGGER, process, os.getpid(), request.ended + offset)
        document["message"] = f"{_called(request)} {_status(request)}"
        document["request_id"] = request.request_id
        if trace_id := trace_id_of(request.trace):
            document["trace_id"] = trace_id
        fields: dict[str, Any] = {
            "client": request.client,
            "key": request.key,
            "protocol": request.protocol,
            "method": request.method,
            "route": request.route,
            "status": _status(request),
            "reply_bytes": request.reply_bytes,
            "duration_ms": _ms(request.ended - request.started),
        }
        if request.runs:
            document["model"] = request.runs[0].model[:_TEXT_MAX]
            fields |= _run_fields(request.runs[0])
        document["fields"] = fields
        return json_line(document)

    return line


def _run_fields(run: Run) -> dict[str, Any]:
    fields: dict[str, Any] = {"version": run.version, "pool": run.pool, "rows": run.rows}
    if run.timing is not None:
        header = run.timing.header
        fields |= {
            "batch_requests": run.timing.requests,
            "lane_ms": _ms(run.timing.put_at - run.arrival),
            "queue_ms": _ms(header.queue_s),
            "run_ms": _ms(header.input_s + header.infer_s + header.output_s),
            "worker": header.worker,
        }
        if header.form:
            fields["form"] = header.form
    return fields


def _called(request: Finished) -> str:
    path = request.path if len(request.path) <= _TEXT_MAX else f"{request.path[:_TEXT_MAX]}..."
    return path if request.protocol == "grpc" else f"{request.method} {path}"


def _status(request: Finished) -> int | str:
    if request.protocol == "http":
        return request.status
    return _GRPC[request.status] if 0 <= request.status < len(_GRPC) else request.status


def _ms(seconds: float) -> float:
    return round(min(max(0.0, seconds), _LARGEST) * 1000, 3)
