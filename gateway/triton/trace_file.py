"""Where traces go: files that are a JSON array of entries at any time, of bounded size, written by all gateways.

traces of one request after the other ─> FILE (log frequency 0), or every N of them ─> FILE.0, FILE.1, …
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gateway.traces import Trace

log = logging.getLogger("millrace.trace")

BYTES_MAX = 64 << 20  # of one file
FILES_MAX = 1000  # with an index
LOCK_S_MAX = 1.0
LOCK_PAUSE_S = 0.01


class TraceFile:
    """`path`: as it is set. Blocking: used in a thread, by one caller at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index = 0
        self._full = False

    def write(self, traces: Sequence[Trace], frequency: int, *, last: bool) -> Sequence[Trace]:
        """Write `traces`; returns those that wait until they are `frequency`, unless these are the `last`."""
        if not traces:
            return ()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not frequency:
                self._append(_text(traces))
                return ()
            whole = len(traces) if last else len(traces) - len(traces) % frequency
            for start in range(0, whole, frequency):
                self._new(_text(traces[start : start + frequency]))
            return traces[whole:]
        except OSError as error:
            log.warning("%d traces could not be written to %s: %s", len(traces), self._path, error)
            return ()

    def _append(self, entries: str) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _locked(descriptor):
                raise TimeoutError("another gateway is writing to it")
            end = os.fstat(descriptor).st_size
            if end + len(entries) > BYTES_MAX:
                self._say_full()
                return
            # The bracket that closes the array makes room for more.
            os.pwrite(descriptor, f",{entries}]".encode() if end > 1 else f"[{entries}]".encode(), max(0, end - 1))
        finally:
            os.close(descriptor)

    def _new(self, entries: str) -> None:
        while self._index < FILES_MAX:
            path = self._path.with_name(f"{self._path.name}.{self._index}")
            self._index += 1
            with suppress(FileExistsError):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(f"[{entries}]")
                return
        self._say_full()

    def _say_full(self) -> None:
        if not self._full:
            self._full = True
            log.warning("%s is full: further traces are dropped; move it away, or set another file", self._path)


def _text(traces: Sequence[Trace]) -> str:
    return ",".join(json.dumps(entry, separators=(",", ":")) for trace in traces for entry in trace)


def _locked(descriptor: int) -> bool:
    until = time.monotonic() + LOCK_S_MAX
    while time.monotonic() < until:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
        else:
            return True
    return False
