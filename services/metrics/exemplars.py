"""Exemplars: for each bucket of a histogram the last observation whose trace is known.

note (by series and bucket) ─> publish ─> <metric file>.exemplars ─> the metrics page of any gateway, in OpenMetrics
Source: OpenMetrics 1.0, section "Exemplars".
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from millstream.services.metrics.catalogue import Metric
from millstream.services.metrics.record import LABEL_CHARACTERS_MAX

SUFFIX = ".exemplars"
KEPT_S = 600.0  # a collector has deleted many older traces, and a page need not show them
PUBLISH_S = 1.0  # least time between two writes of the file
SERIES_MAX = 1000  # series with exemplars of one process; the series with the oldest ones are dropped
_FILE_BYTES_MAX = 16 << 20


class Exemplar(NamedTuple):
    """An observation whose trace is known."""

    trace_id: str
    value: float
    at: float  # Unix time


#: by the name of the metric and label values: bucket -> exemplar
Exemplars = Mapping[tuple[str, tuple[str, ...]], Mapping[int, Exemplar]]


class ExemplarFile:
    """The exemplars of one process. Only one thread may use it.

    Args:
        path: the file, next to the process' metric file; None: only this process sees them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._series: dict[tuple[str, tuple[str, ...]], dict[int, Exemplar]] = {}
        self._changed = False
        self._published_at = float("-inf")
        self.published: Exemplars = {}  # of this process, for a page of this process alone

    def note(self, metric: Metric, labels: tuple[str, ...], value: float, trace_id: str) -> None:
        """Remember an observation as that of its bucket, in place of an earlier one."""
        labels = tuple(label[:LABEL_CHARACTERS_MAX] for label in labels)
        series = self._series.pop((metric.name, labels), {})
        at = time.time()  # noqa: TID251 - for Prometheus
        series[bisect_left(metric.buckets, value)] = Exemplar(trace_id, value, at)
        self._series[metric.name, labels] = series
        if len(self._series) > SERIES_MAX:
            del self._series[next(iter(self._series))]
        self._changed = True

    def publish(self, *, now: float) -> None:
        """Write the file if there are new exemplars. `now`: monotonic time. A full disk costs exemplars alone."""
        if not self._changed or now - self._published_at < PUBLISH_S:
            return
        self._changed, self._published_at = False, now
        self.published = {key: dict(series) for key, series in self._series.items()}
        if self._path is None:
            return
        document = [[name, labels, list(series.items())] for (name, labels), series in self._series.items()]
        temporary = self._path.with_suffix(f"{SUFFIX}.new")
        try:
            temporary.write_text(json.dumps(document, separators=(",", ":")))
            temporary.rename(self._path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the file."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def read_exemplars(directory: Path) -> Exemplars:
    """Return the exemplars of all processes of a folder, of each bucket the latest. Files of the past are removed."""
    found: dict[tuple[str, tuple[str, ...]], dict[int, Exemplar]] = {}
    oldest = time.time() - KEPT_S  # noqa: TID251 - as in the files
    for name in _names(directory):
        with suppress(ValueError, TypeError):  # another release may write another form
            _merge(found, _read(directory / name, oldest), oldest)
    return found


def _merge(found: dict[tuple[str, tuple[str, ...]], dict[int, Exemplar]], document: list[Any], oldest: float) -> None:
    for metric, labels, buckets in document:
        series = found.setdefault((metric, tuple(labels)), {})
        for bucket, (trace_id, value, at) in buckets:
            known = series.get(bucket)
            if at >= oldest and (known is None or at > known.at):
                series[bucket] = Exemplar(trace_id, value, at)


def _names(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))  # noqa: PTH208
    except OSError:
        return []


def _read(path: Path, oldest: float) -> list[Any]:
    """Return the content of a file; nothing if it is old, or no longer there."""
    try:
        status = path.stat()
        if status.st_mtime < oldest:
            path.unlink(missing_ok=True)  # of a process that was killed, or has had no traces since
            return []
        if status.st_size > _FILE_BYTES_MAX:
            return []
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    return list(document)
