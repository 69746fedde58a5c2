"""Files of traces, written by all gateways, bounded in size and number. Each is always a whole JSON array.

log frequency 0: traces ─> FILE; when it is full it becomes FILE.old.1, then .2, then .3, then it is deleted
log frequency N: every N traces ─> FILE.0, FILE.1, …; when there are too many, the oldest are deleted
"""

from __future__ import annotations

import errno
import fcntl
import glob
import itertools
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from millstream.plugins.compat.triton.traces import Trace

log = logging.getLogger("millstream.trace")

BYTES_MAX = 64 << 20  # size of FILE; beyond it, FILE is rotated
OLD_MAX = 3  # full files that are kept
FILES_MAX = 1000  # files with an index; beyond it, the oldest is deleted
FILES_BYTES_MAX = 256 << 20  # size of all files with an index; beyond it, the oldest is deleted
LOCK_S_MAX = 1.0
LOCK_PAUSE_S = 0.01
TRIES_MAX = 100  # attempts to write while other gateways rotate the file or take the name first


class TraceFile:
    """Writes traces to `path`. Blocking: use it in a thread, by one caller at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next: int | None = None  # index of the next file; None: unknown

    def write(self, traces: Sequence[Trace], frequency: int, *, last: bool) -> Sequence[Trace]:
        """Write traces, and return those that do not fill a file. Traces that cannot be written are dropped.

        Args:
            traces: The traces to write.
            frequency: How many traces each file with an index has; 0: all traces go to one file.
            last: Whether to write all traces, even if they do not fill a file.
        """
        if not traces:
            return ()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not frequency:
                self._append(_text(traces))
                return ()
            complete = len(traces) if last else len(traces) - len(traces) % frequency
            for start in range(0, complete, frequency):
                self._new(_text(traces[start : min(start + frequency, complete)]))
            if complete:
                self._drop_oldest()
            return traces[complete:]
        except OSError as error:
            log.warning("%d traces could not be written to %s: %s", len(traces), self._path, error)
            return ()

    def _append(self, entries: bytes) -> None:
        for _ in range(TRIES_MAX):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if not _locked(descriptor):
                    raise TimeoutError("another gateway is writing to it")
                if not self._is_current(descriptor):
                    continue  # another gateway has rotated the file
                end = os.fstat(descriptor).st_size
                if end > 1 and end + len(entries) > BYTES_MAX:
                    self._rotate()
                    continue
                _extend(descriptor, end, entries)
                return
            finally:
                os.close(descriptor)
        raise TimeoutError("other gateways keep rotating it")

    def _is_current(self, descriptor: int) -> bool:
        """Whether the path is still the name of this file."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        names = [self._path, *(self._path.with_name(f"{self._path.name}.old.{n}") for n in range(1, OLD_MAX + 1))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            if newer.exists():
                newer.replace(older)

    def _new(self, entries: bytes) -> None:
        for _ in range(TRIES_MAX):
            index = self._next_index()
            path = self._path.with_name(f"{self._path.name}.{index}")
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:  # another gateway has made it
                self._next = None
                continue
            try:
                _extend(descriptor, 0, entries)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            self._next = index + 1
            return
        raise FileExistsError(errno.EEXIST, "other gateways keep taking the next name")

    def _next_index(self) -> int:
        if self._next is None:
            self._next = max((number for number, _ in self._indexed()), default=-1) + 1
        return self._next

    def _indexed(self) -> list[tuple[int, Path]]:
        """Return the files with an index, oldest first."""
        prefix = f"{self._path.name}."
        suffixes = [
            (path.name.removeprefix(prefix), path) for path in self._path.parent.glob(f"{glob.escape(prefix)}*")
        ]
        return sorted((int(number), path) for number, path in suffixes if number.isdecimal())

    def _drop_oldest(self) -> None:
        """Delete the oldest files with an index that exceed the limits. Several gateways may do this at once."""
        left_bytes = FILES_BYTES_MAX
        for kept, (_, path) in enumerate(reversed(self._indexed())):
            try:
                left_bytes -= path.stat().st_size
                if kept >= FILES_MAX or (left_bytes < 0 and kept):
                    path.unlink()
            except FileNotFoundError:
                continue


def _text(traces: Sequence[Trace]) -> bytes:
    # Runs in a thread: turning tensors' elements into text takes time.
    entries = (json.dumps(entry, separators=(",", ":"), default=str) for trace in traces for entry in trace)
    return ",".join(entries).encode()


def _extend(descriptor: int, end: int, entries: bytes) -> None:
    """Append entries to the array in a file of `end` bytes. On OSError the file is as it was."""
    # The entries overwrite the bracket that closes the array.
    text, at = (b",%b]" % entries, end - 1) if end > 1 else (b"[%b]" % entries, 0)
    written = os.pwrite(descriptor, text, at)
    if written == len(text):
        return
    os.ftruncate(descriptor, at)
    if at:
        os.pwrite(descriptor, b"]", at)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
