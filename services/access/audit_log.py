"""What was changed through the admin API, by whom: JSON lines in the repository, bounded in size.

<root>/audit/<writer>.jsonl       one file for each gateway of each machine, so that no two processes write to one
<root>/audit/<writer>.1.jsonl …   earlier lines; the oldest file goes when there are FILES_MAX
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from heapq import nlargest
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from millstream.services.process.audit import Changes
from millstream.services.repository.disk import storage_errors

FILE_BYTES_MAX = 4 << 20
FILES_MAX = 4  # of one writer
FOLDER_FILES_MAX = 256  # of all writers: a container has a new name each time it starts
LINE_BYTES_MAX = 16 << 10  # a longer entry loses its details
_NAME = re.compile(r"[^A-Za-z0-9._-]")
TEXT_CHARACTERS_MAX = 512  # of an address, a path, …


class Who(NamedTuple):
    """Who made a call.

    Args:
        label: of the key; "": there was none, and none was needed.
        key_id: of the key; "": there was none, or the admin key.
        address: from where.
    """

    label: str
    key_id: str
    address: str


class AuditLog:
    """The audit log of one gateway, in the repository's folder `root`. Safe for several threads.

    `writer`: name of machine and gateway.
    """

    def __init__(self, root: Path, writer: str) -> None:
        self._folder = root / "audit"
        self._writer = _NAME.sub("_", writer)[:100]
        self._lock = threading.Lock()

    def append(self, entry: dict[str, Any]) -> None:
        """Write an entry durably. Blocking. Raises Failure(STORAGE, INTERNAL)."""
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        if len(line) > LINE_BYTES_MAX:
            line = orjson.dumps({**entry, "changes": ["(too long)"]}, option=orjson.OPT_APPEND_NEWLINE)
        with self._lock, storage_errors(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._path(0)
            with suppress(FileNotFoundError):
                if path.stat().st_size + len(line) > FILE_BYTES_MAX:
                    self._rotate()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                if not size:
                    self._remove_oldest()
                elif os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # after a write that was cut off
                if os.write(descriptor, line) < len(line):
                    os.ftruncate(descriptor, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _remove_oldest(self) -> None:
        """Remove the files that were written longest ago, of gateways that may be gone, beyond FOLDER_FILES_MAX."""
        ages: list[tuple[float, Path]] = []
        for path in self._folder.glob("*.jsonl"):
            with suppress(FileNotFoundError):
                ages.append((path.stat().st_mtime, path))
        for _, path in nlargest(len(ages), ages)[FOLDER_FILES_MAX:]:
            path.unlink(missing_ok=True)

    def _rotate(self) -> None:
        for number in range(FILES_MAX - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._path(number - 1).replace(self._path(number))

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._writer}{f'.{number}' if number else ''}.jsonl"

    def newest(self, count: int, wanted: Callable[[dict[str, Any]], bool] = bool) -> list[dict[str, Any]]:
        """Return the newest wanted entries of all writers, the newest last. Blocking. Raises Failure(INTERNAL)."""
        with storage_errors(self._folder):
            try:
                paths = sorted(self._folder.glob("*.jsonl"))
            except FileNotFoundError:
                return []
            found = nlargest(count, filter(wanted, (entry for path in paths for entry in _entries(path))), key=_instant)
        return found[::-1]


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            try:
                entry = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # a write that was cut off
            if isinstance(entry, dict):
                yield entry


def _instant(entry: Mapping[str, Any]) -> float:
    at = entry.get("at")
    return float(at) if isinstance(at, int | float) else 0.0


class Wanted(NamedTuple):
    """Which entries are wanted.

    Args:
        key: id or name of the key, or the whole `by`; None: any.
        model: glob of the model's name; None: any.
        since, until: seconds since the epoch.
    """

    key: str | None = None
    model: str | None = None
    since: float = -inf
    until: float = inf

    def matches(self, entry: Mapping[str, Any]) -> bool:
        """Whether an entry is wanted."""
        by = str(entry.get("by", ""))
        if self.key is not None and self.key not in {entry.get("key"), by} and not by.endswith(f" ({self.key})"):
            return False
        if self.model is not None and not fnmatchcase(str(entry.get("model") or ""), self.model):
            return False
        return self.since <= _instant(entry) < self.until


def audit_entry(now: float, who: Who, what: str, target: str, outcome: int | str, changes: Changes) -> dict[str, Any]:
    """Return an entry of the audit log. `now`: seconds since the epoch.

    `target`: method and path, or the full name of a gRPC method; `outcome`: the HTTP or gRPC status; `changes`: what
    the operation says that it changed, and of which model.
    """
    return {
        "at": round(now, 3),
        "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
        "by": who.label[:TEXT_CHARACTERS_MAX] or "without a key",
        "key": who.key_id,
        "address": who.address[:TEXT_CHARACTERS_MAX],
        "what": what[:TEXT_CHARACTERS_MAX],
        "target": target[:TEXT_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode(),
        "outcome": outcome,
        "model": changes.model[:TEXT_CHARACTERS_MAX],
        "changes": changes.texts,
    }
