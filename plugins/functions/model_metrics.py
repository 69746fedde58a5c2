"""Metrics that models declare (triton/model_metrics.py), from the process of a model to the metrics page.

snapshot of a model ─> checked, as it is somebody else's ─> a file of its instance ─> lines of the page of this machine
Several instances: counters and histograms are added up, and of gauges the last that was written counts.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from millstream.services.metrics.record import Totals
from millstream.services.settings import read_settings

FOLDER = "run/model-metrics"  # below the home
FAMILIES_MAX, METRICS_MAX, LABELS_MAX, BUCKETS_MAX = 64, 256, 16, 64  # as in triton/model_metrics.py
_CHARACTERS_MAX, _DESCRIPTION_CHARACTERS_MAX = 200, 500
_BYTES_MAX = 4 << 20
_OURS = ("millstream_", "nv_", "process_", "python_")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_KINDS = frozenset({"counter", "gauge", "histogram"})
_numbers = count()


class Series(NamedTuple):
    """One metric. `counts`: of a histogram, whose sum `value` is, for each bucket and those above."""

    labels: tuple[tuple[str, str], ...]
    value: float
    buckets: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    def added(self, other: Series) -> Series:
        """Return both together, if their buckets are the same."""
        if self.buckets != other.buckets:
            return self
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return self._replace(value=self.value + other.value, counts=counts)


class Family(NamedTuple):
    """The metrics of one name."""

    name: str
    kind: str
    description: str
    series: tuple[Series, ...]


def checked(told: Any) -> list[Family]:
    """Return what a process tells of its metrics. Raises ValueError for what is none."""
    try:
        families = [_family(*one) for one in told]
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"metrics cannot be read: {error}") from error
    if len(families) > FAMILIES_MAX or sum(len(one.series) for one in families) > METRICS_MAX:
        raise ValueError("there are too many metrics")
    return families


def _family(name: str, kind: str, description: str, series: Sequence[Any]) -> Family:
    if kind not in _KINDS or not _NAME.fullmatch(name) or name.startswith(_OURS) or len(name) > _CHARACTERS_MAX:
        raise ValueError("a metric has no usable name")
    text = " ".join(str(description).split())[:_DESCRIPTION_CHARACTERS_MAX].replace("\\", "\\\\")
    return Family(name, kind, text, tuple(_series(kind, *one) for one in series))


def _series(kind: str, labels: Mapping[str, str], value: float, buckets: Sequence[float], counts: Any) -> Series:
    found = tuple(sorted((str(name), str(text)) for name, text in labels.items()))
    if len(found) > LABELS_MAX or any(
        not _NAME.fullmatch(name) or ":" in name or max(len(name), len(text)) > _CHARACTERS_MAX for name, text in found
    ):
        raise ValueError("a metric has a label that cannot be")
    if kind != "histogram":
        return Series(found, float(value))
    limits, numbers = tuple(map(float, buckets)), tuple(map(int, counts))
    if len(limits) > BUCKETS_MAX or len(numbers) != len(limits) + 1 or not all(map(math.isfinite, limits)):
        raise ValueError("a histogram has buckets that cannot be")
    return Series(found, float(value), limits, numbers)


class MetricsFile:
    """The file with the metrics of one instance, which are on the page while it is there."""

    def __init__(self, home: Path) -> None:
        self._path = home / FOLDER / f"{os.getpid()}-{next(_numbers)}.json"
        self._written: Any = None

    def write(self, told: Any) -> None:
        """Write what the instance tells, if it has changed. Raises ValueError for what is none."""
        if told == self._written or (not told and self._written is None):
            return
        checked(told)
        self._written = told
        made = self._path.with_suffix(".new")
        with suppress(OSError):  # a full disk costs a page some lines, and no request its answer
            self._path.parent.mkdir(parents=True, exist_ok=True)
            made.write_text(json.dumps(told))
            made.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def metrics_page(_snapshot: Any) -> Callable[[Totals, bool], str]:
    """Return the function that writes the metrics of the models on this machine."""
    folder = read_settings().home / FOLDER

    def lines(_totals: Totals, openmetrics: bool) -> str:
        return "".join(_lines(_merged(folder), openmetrics=openmetrics))

    return lines


def _merged(folder: Path) -> dict[str, Family]:
    """Return the families of all instances; a name with another kind than before is left out."""
    merged: dict[str, Family] = {}
    with suppress(OSError):
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
            if not Path(f"/proc/{path.name.partition('-')[0]}").exists():  # its worker was killed
                path.unlink(missing_ok=True)
                continue
            with suppress(ValueError, OSError), path.open("rb") as file:
                for family in checked(json.loads(file.read(_BYTES_MAX))):
                    known = merged.get(family.name)
                    if known is None or known.kind == family.kind:
                        merged[family.name] = family if known is None else _together(known, family)
    return merged


def _together(known: Family, other: Family) -> Family:
    series = {one.labels: one for one in known.series}
    for one in other.series:
        before = series.get(one.labels)
        series[one.labels] = one if before is None or known.kind == "gauge" else before.added(one)
    return known._replace(series=tuple(series.values()))


def _lines(families: Mapping[str, Family], *, openmetrics: bool) -> Iterator[str]:
    for name, family in sorted(families.items()):
        kind = "unknown" if openmetrics and family.kind == "counter" else family.kind
        yield f"# HELP {name} {family.description}\n# TYPE {name} {kind}\n"
        for one in family.series:
            if family.kind != "histogram":
                yield f"{name}{_labels(one.labels)} {one.value:.17g}\n"
                continue
            total = 0
            for limit, number in zip((*map(repr, one.buckets), "+Inf"), one.counts, strict=True):
                total += number
                yield f"{name}_bucket{_labels((*one.labels, ('le', limit)))} {total}\n"
            yield f"{name}_sum{_labels(one.labels)} {one.value:.17g}\n{name}_count{_labels(one.labels)} {total}\n"


def _labels(labels: Sequence[tuple[str, str]]) -> str:
    if not labels:
        return ""
    escaped = ((name, text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, text in labels)
    return "{" + ",".join(f'{name}="{text}"' for name, text in escaped) + "}"
