"""Reads the log files of this machine's processes: the newest lines that match, and those that are written now.

home/logs/PROCESS.log, .log.1, … ─blocks from the end─> records, newest first ─> filter ─> merged by time
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any

LINES_MAX = 500  # of a reply
READ_BYTES_MAX = 4 << 20  # of all files, for one reply; what is older is found with a filter for one process
TAIL_BYTES_MAX = 256 << 10  # of a file, between two looks; what is older is left out
TEXT_MAX = 8192  # characters of a line that are shown
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_BLOCK_BYTES = 64 << 10
_ROTATED = 3
#: "2026-01-31 12:00:00,123 INFO logger: …", and the same with the time of ISO 8601
_LINE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[.,](\d{3})(Z?) ([A-Z]+) ")
#: "12:M 31 Jan 2026 12:00:00.123 * …": Redis
_REDIS = re.compile(r"\d+:[A-Z] (\d\d \w{3} \d{4} \d\d:\d\d:\d\d)\.(\d{3}) ([.\-*#]) ")
_REDIS_LEVELS = {".": "DEBUG", "-": "DEBUG", "*": "INFO", "#": "WARNING"}


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which lines are wanted. Empty: all. `level`: that, and what is worse; `before`: seconds since the epoch."""

    process: str = ""
    level: str = ""
    text: str = ""
    before: float | None = None

    def takes(self, line: LogLine) -> bool:
        """Whether a line is wanted."""
        if self.level in LEVELS and LEVELS.index(line.level) < LEVELS.index(self.level):
            return False
        if self.before is not None and line.at >= self.before:
            return False
        return self.text.lower() in line.text.lower()


@dataclass(frozen=True, slots=True)
class LogLine:
    """A record of a log, with the lines that continue it. `at`: seconds since the epoch."""

    at: float
    process: str
    level: str
    text: str

    def document(self) -> dict[str, Any]:
        return {"at": self.at, "process": self.process, "level": self.level, "text": self.text[:TEXT_MAX]}


def processes(folder: Path) -> list[str]:
    """Return the names of the processes that have a log."""
    return sorted(path.name.removesuffix(".log") for path in folder.glob("*.log"))


def newest(folder: Path, wanted: LogFilter) -> list[dict[str, Any]]:
    """Return the newest lines that are wanted, the newest last. Blocks."""
    names = [name for name in processes(folder) if wanted.process in {"", name}]
    each = READ_BYTES_MAX // max(1, len(names))
    found = merge(*(_backwards(folder, name, each) for name in names), key=lambda line: -line.at)
    return [line.document() for line in islice(filter(wanted.takes, found), LINES_MAX)][::-1]


def _backwards(folder: Path, process: str, bytes_max: int) -> Iterator[LogLine]:
    """Yield the records of a process, the newest first, from at most so many bytes."""
    rest: list[str] = []  # lines that continue a record, the last one first
    for path in (folder / f"{process}.log", *(folder / f"{process}.log.{number}" for number in range(1, _ROTATED + 1))):
        with suppress(OSError), path.open("rb") as file:
            for text in _lines_backwards(file, bytes_max):
                line = _parsed(process, text, rest)
                if line is None:
                    rest.append(text)
                    del rest[100:]
                else:
                    yield line
                    rest = []
            bytes_max -= file.seek(0, 2)
        if bytes_max <= 0:
            return


def _lines_backwards(file: Any, bytes_max: int) -> Iterator[str]:
    at = file.seek(0, 2)
    end = max(0, at - bytes_max)
    head = b""
    while at > end:
        size = min(_BLOCK_BYTES, at - end)
        at = file.seek(at - size)
        head, *lines = (file.read(size) + head).split(b"\n")
        if len(head) > 2 * _BLOCK_BYTES:  # no line of ours is so long
            head = head[-_BLOCK_BYTES:]
        yield from (line.decode(errors="replace") for line in reversed(lines) if line)
    if head and not end:
        yield head.decode(errors="replace")


def _parsed(process: str, text: str, rest: list[str]) -> LogLine | None:
    """Return the record that a line begins; None: it continues one. `rest`: the lines after it, the last one first."""
    if text.startswith("{"):
        with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            document = json.loads(text)
            at = datetime.fromisoformat(document["time"]).timestamp()
            return LogLine(at, process, _level(document.get("level")), "\n".join(_said(document)))
    found = _LINE.match(text)
    if found is not None:
        shape = "%Y-%m-%dT%H:%M:%S" if "T" in found[1] else "%Y-%m-%d %H:%M:%S"
        level, whole = found[4], "\n".join([text[found.end() :], *reversed(rest)])
        moment = _instant(found[1], shape, int(found[2]), utc=bool(found[3]))
        return None if moment is None else LogLine(moment, process, _level(level), whole)
    found = _REDIS.match(text)
    if found is None:
        return None
    moment = _instant(found[1], "%d %b %Y %H:%M:%S", int(found[2]))
    whole = "\n".join([text[found.end() :], *reversed(rest)])
    return None if moment is None else LogLine(moment, process, _REDIS_LEVELS[found[3]], whole)


def _instant(text: str, shape: str, milliseconds: int, *, utc: bool = False) -> float | None:
    with suppress(ValueError, OverflowError):
        moment = datetime.strptime(text, shape)
        return (moment.replace(tzinfo=timezone.utc) if utc else moment).timestamp() + milliseconds / 1000
    return None


def _level(name: object) -> str:
    return name if isinstance(name, str) and name in LEVELS else "INFO"


def _said(document: dict[str, Any]) -> list[str]:
    """Return the lines of a JSON record: its message, with the logger, and a traceback."""
    said = [f"{document.get('logger', '')}: {document['message']}".removeprefix(": ")]
    return said + ([str(document["exception"])] if document.get("exception") else [])


@dataclass(slots=True)
class LogTail:
    """Follows the logs of a folder for one reader, from now on."""

    folder: Path
    wanted: LogFilter
    _ends: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ends = {name: size for name in processes(self.folder) if (size := self._size(name)) is not None}

    def read(self) -> list[dict[str, Any]]:
        """Return the lines since the last call that are wanted, at most LINES_MAX of the newest. Blocks."""
        found: list[LogLine] = []
        for name in processes(self.folder):
            if self.wanted.process in {"", name}:
                found += self._added(name)
        found.sort(key=lambda line: line.at)
        return [line.document() for line in found if self.wanted.takes(line)][-LINES_MAX:]

    def _size(self, name: str) -> int | None:
        with suppress(OSError):
            return (self.folder / f"{name}.log").stat().st_size
        return None

    def _added(self, name: str) -> list[LogLine]:
        size, start = self._size(name), self._ends.get(name, 0)
        if size is None:
            return []
        start = 0 if size < start else max(start, size - TAIL_BYTES_MAX)  # it was rotated, or grew by more
        with suppress(OSError), (self.folder / f"{name}.log").open("rb") as file:
            file.seek(start)
            text = file.read(size - start)
            whole = text[: text.rfind(b"\n") + 1]  # a line that is being written is read the next time
            self._ends[name] = start + len(whole)
            return list(_records(name, whole.decode(errors="replace").split("\n")))
        return []


def _records(process: str, lines: list[str]) -> Iterator[LogLine]:
    rest: list[str] = []
    for text in reversed(lines):
        line = _parsed(process, text, rest) if text else None
        if line is not None:
            yield line
            rest = []
        elif text:
            rest.append(text)
