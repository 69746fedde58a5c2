"""Where traces go: files that are a JSON array of entries at any time, written by all gateways, bounded in size and number.

traces of one request after the other ─> FILE (log frequency 0); full: FILE.old.1, .2, .3, of which the last is dropped
or every N of them ─> FILE.0, FILE.1, …; too many: the oldest are dropped
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

from millstream.gateway.scheduling.traces import Trace

log = logging.getLogger("millstream.trace")

BYTES_MAX = 64 << 20  # of FILE; beyond it another one is begun
OLD_MAX = 3  # full ones that are kept
FILES_MAX = 1000  # with an index; beyond it the oldest is dropped
FILES_BYTES_MAX = 256 << 20  # of all of them, likewise
LOCK_S_MAX = 1.0
LOCK_PAUSE_S = 0.01
TRIES_MAX = 100  # for a file that others begin anew, or a name that others take, meanwhile


class TraceFile:
    """`path`: as it is set. Blocking: used in a thread, by one caller at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next: int | None = None  # index

    def write(self, traces: Sequence[Trace], frequency: int, *, last: bool) -> Sequence[Trace]:
        """Write `traces`; returns those that wait until they are `frequency`, unless these are the `last`.

        What cannot be written is dropped, and logged.
        """
        if not traces:
            return ()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not frequency:
                self._append(_text(traces))
                return ()
            whole = len(traces) if last else len(traces) - len(traces) % frequency
            for start in range(0, whole, frequency):
                self._new(_text(traces[start : min(start + frequency, whole)]))
            if whole:
                self._drop_oldest()
            return traces[whole:]
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
                    continue  # the gateway that held the lock has begun another file
                end = os.fstat(descriptor).st_size
                if end > 1 and end + len(entries) > BYTES_MAX:
                    self._rotate()
                    continue
                _extend(descriptor, end, entries)
                return
            finally:
                os.close(descriptor)
        raise TimeoutError("other gateways begin it anew all the time")

    def _is_current(self, descriptor: int) -> bool:
        """Whether our path still is the name of this file."""
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
            except FileExistsError:  # another gateway's
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
        raise FileExistsError(errno.EEXIST, "other gateways take all names")

    def _next_index(self) -> int:
        if self._next is None:
            self._next = max((number for number, _ in self._indexed()), default=-1) + 1
        return self._next

    def _indexed(self) -> list[tuple[int, Path]]:
        """The files with an index, the oldest first."""
        prefix = f"{self._path.name}."
        found = [(path.name.removeprefix(prefix), path) for path in self._path.parent.glob(f"{glob.escape(prefix)}*")]
        return sorted((int(number), path) for number, path in found if number.isdecimal())

    def _drop_oldest(self) -> None:
        """Several gateways may do so at once."""
        left_bytes = FILES_BYTES_MAX
        for kept, (_, path) in enumerate(reversed(self._indexed())):
            try:
                left_bytes -= path.stat().st_size
                if kept >= FILES_MAX or (left_bytes < 0 and kept):
                    path.unlink()
            except FileNotFoundError:
                continue


def _text(traces: Sequence[Trace]) -> bytes:
    # tensors' elements become text here: in a thread
    entries = (json.dumps(entry, separators=(",", ":"), default=str) for trace in traces for entry in trace)
    return ",".join(entries).encode()


def _extend(descriptor: int, end: int, entries: bytes) -> None:
    """Put entries into a file of `end` bytes. Raises OSError: there is no room, and the file is as it was."""
    # The bracket that closes the array makes room for more.
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
