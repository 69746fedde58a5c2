"""The calls of a simulation from the access log of gateways: which models were called, and when.

gateway-0-access.log, .log.1, … ─> lines, as text or JSON ─> LoggedCall ─> Trace

A line is written when a request ends; its call came `duration` earlier. A request that was refused has no run, so its
model is that of its path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from millstream.plugins.plan.simulation.traffic import Trace, sorted_trace

LOGGER = "millstream.access"
LOOKED_AT_LINES = 100  # the first ones, which tell whether a file is a log with access lines
_TIME = re.compile(r'(?:\{"time": ")?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?:Z|[+-]\d\d:\d\d)?)')
_TEXT = re.compile(
    rf'.{{19,40}}? INFO {re.escape(LOGGER)}: .*?"(?P<called>[^"]*)" (?P<status>\w+) \d+ bytes (?P<ms>[\d.]+) ms'
    r"(?: (?P<model>\S+):(?P<version>\d+) rows \d+)? \(request "
)
#: requests that run a model, by their path: Open Inference Protocol and TensorFlow Serving
_PATH = re.compile(
    r"POST /(?:v2/models/(?P<v2>[^/?]+)(?:/versions/(?P<v2_version>\d+))?/(?:infer|generate|generate_stream)"
    r"|v1/models/(?P<v1>[^/:?]+)(?:/versions/(?P<v1_version>\d+))?:(?:predict|classify|regress))\b"
)
#: of requests that would have run if a model had been there in time
_REFUSED = frozenset({"429", "503", "504"})


class LoggedCall(NamedTuple):
    """A call of a model. `version`: 0 if its line does not say it. `at_s`: seconds since the epoch."""

    model: str
    version: int
    at_s: float


class LoggedTrace(NamedTuple):
    """The calls of a log, and the number of those to other models than the known ones, which are left out."""

    trace: Trace
    left_out: int


def log_files(path: Path) -> list[Path]:
    """Return the access logs in a folder of logs, or in the `logs` of a home; a file itself. Raises OSError."""
    if not path.is_dir():
        return [path]
    folder = path / "logs" if (path / "logs").is_dir() else path
    return sorted(one for one in folder.iterdir() if re.fullmatch(r".+-access\.log(?:\.\d+)?", one.name))


def is_access_log(lines: Sequence[str]) -> bool:
    """Return whether one of the first lines of a file is one of an access log."""
    return any(call_line(line) for line in lines[:LOOKED_AT_LINES])


def call_line(line: str) -> bool:
    """Return whether a line is one of an access log."""
    return _record(line) is not None if line.startswith("{") else _TEXT.match(line) is not None


def calls_of(lines: Iterable[str]) -> Iterator[LoggedCall]:
    """Yield the calls of an access log; other lines, and requests that run no model, are left out."""
    for line in lines:
        ended_s = time_of(line)
        if ended_s is None:
            continue
        with suppress(TypeError, ValueError):  # a line that another program wrote, or that was cut off
            call = _call_of(line, ended_s)
            if call is not None:
                yield call


def trace_of(calls: Iterable[LoggedCall], names: Collection[str]) -> LoggedTrace:
    """Return the trace of logged calls. Raises ValueError if none is to a known model.

    Args:
        calls: in any order.
        names: of the models; a version that is not the active one is called "name:version".
    """
    index = {name: at for at, name in enumerate(names)}
    seconds: list[float] = []
    models: list[int] = []
    left_out = 0
    for call in calls:
        at = index.get(f"{call.model}:{call.version}", index.get(call.model))
        if at is None:
            left_out += 1
        else:
            seconds.append(call.at_s)
            models.append(at)
    if not seconds:
        raise ValueError(f"none of its calls, {left_out:,}, is to one of the models")
    first = min(seconds)
    return LoggedTrace(sorted_trace([one - first for one in seconds], models), left_out)


def time_of(line: str) -> float | None:
    """Return the time at the start of a log line, in seconds since the epoch; None: it has none."""
    match = _TIME.match(line)
    try:
        return None if match is None else datetime.fromisoformat(match[1].replace(",", ".")).timestamp()
    except (ValueError, OverflowError):
        return None


def _call_of(line: str, ended_s: float) -> LoggedCall | None:
    if line.startswith("{"):
        record = _record(line)
        if record is None:
            return None
        fields = record["fields"]
        model, version = record.get("model"), fields.get("version")
        status, called, ms = str(fields.get("status")), str(record.get("message")), fields.get("duration_ms", 0.0)
    else:
        match = _TEXT.match(line)
        if match is None:
            return None
        model, version = match["model"], match["version"]
        status, called, ms = match["status"], match["called"], match["ms"]
    at_s = ended_s - float(ms) / 1000
    if model:
        return LoggedCall(str(model), int(version or 0), at_s)
    path = _PATH.match(called) if status in _REFUSED else None
    if path is None:
        return None
    return LoggedCall(unquote(path["v2"] or path["v1"]), int(path["v2_version"] or path["v1_version"] or 0), at_s)


def _record(line: str) -> dict[str, Any] | None:
    """Return the JSON object of a line of an access log; None: it is another line."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(document, dict) and document.get("logger") == LOGGER
    return document if known and isinstance(document.get("fields"), dict) else None
