"""Log lines -> entries: a line with a time, and the lines below it without one, like a traceback. Pure.

Lines are text as logging writes it (local time, or ISO 8601), JSON objects with "time", or those of Redis.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from millstream.services.process.printable import printable

#: An entry with more lines is shown as several.
ENTRY_LINES_MAX = 1000
NO_TIME = float("-inf")

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?\d*(Z|[+-]\d\d:?\d\d)?\b")
_REDIS_TIME = re.compile(r"\d+:[A-Z] (\d\d) ([A-Z][a-z][a-z]) (\d{4}) (\d\d:\d\d:\d\d)\.(\d{3}) ")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(slots=True)
class Entry:
    """An entry of the log of `process`. `time_s`: seconds since the epoch, NO_TIME if no line above it has one."""

    process: str
    time_s: float
    lines: list[str] = field(default_factory=list)
    continued: bool = False  # its first line has no time: it continues the entry above

    @property
    def record(self) -> dict[str, Any] | None:
        """The JSON object that the entry is; None for text."""
        return _record(self.lines[0]) if len(self.lines) == 1 else None


def time_of(line: str) -> float | None:
    """Return the time of a log line in seconds since the epoch; None for a line that continues an entry."""
    record = _record(line)
    match = _TIME.match(str(record.get("time")) if record is not None else line)
    try:
        if match is not None:
            date, clock, fraction, zone = match.groups()
            return datetime.fromisoformat(f"{date}T{clock}.{(fraction or '0'):0<6}{zone or ''}").timestamp()
        if (redis := _REDIS_TIME.match(line)) is not None:
            day, month, year, clock, fraction = redis.groups()
            number = _MONTHS.index(month) + 1
            return datetime.fromisoformat(f"{year}-{number:02}-{day}T{clock}.{fraction}000").timestamp()
    except (ValueError, OverflowError):
        return None
    return None


def entries_backwards(process: str, lines: Iterable[str]) -> Iterator[Entry]:
    """Yield the entries of lines that come in reverse order, the last one first."""
    below: list[str] = []
    for line in lines:
        below.append(line)
        if (time_s := time_of(line)) is not None or len(below) >= ENTRY_LINES_MAX:
            yield Entry(process, NO_TIME if time_s is None else time_s, below[::-1])
            below = []
    if below:
        yield Entry(process, NO_TIME, below[::-1])


def entries(process: str, lines: Iterable[str], time_s: float) -> Iterator[Entry]:
    """Yield the entries of lines in order; lines before the first time have `time_s`, that of the entry above them."""
    entry: Entry | None = None
    for line in lines:
        at = time_of(line)
        if entry is None or at is not None or len(entry.lines) >= ENTRY_LINES_MAX:
            if entry is not None:
                yield entry
            entry = Entry(process, time_s if at is None else at, continued=at is None)
            time_s = entry.time_s
        entry.lines.append(line)
    if entry is not None:
        yield entry


def about_model(name: str) -> Callable[[Entry], bool]:
    """Return whether an entry names a model: as its field `model`, or as a word of its text."""
    # A name may contain dots and dashes: `digits` is no word of `digits-2` and `digits.old`.
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)")
    return lambda entry: any(word.search(line) for line in entry.lines)


def readable(entry: Entry) -> list[str]:
    """Return an entry's lines for people, without control characters; a JSON record as logging writes it as text."""
    record = entry.record
    if record is None or "message" not in record:
        return [printable(line.replace("\t", "    ")) for line in entry.lines]
    at = datetime.fromtimestamp(entry.time_s) if entry.time_s != NO_TIME else None
    trace = f", trace {record['trace_id']}" if record.get("trace_id") else ""
    request = f" (request {record['request_id']}{trace})" if record.get("request_id") else ""
    when = f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03} " if at is not None else ""
    head = f"{when}{record.get('level', 'INFO')} {record.get('logger', '-')}: {record['message']}{request}"
    lines = [head, *str(record.get("exception") or "").splitlines()]
    return [printable(line.replace("\t", "    ")) for line in lines]


def _record(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
