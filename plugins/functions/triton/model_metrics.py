"""Metrics that a model declares: `MetricFamily` and `Metric` of Triton's module, and what the worker is told of them.

MetricFamily ─> Metric ─> values, kept here ─> `snapshot`, which goes with the answer of a run ─> the metrics page
What nothing refers to any longer is forgotten, as in Triton. Numbers and sizes are bounded: a page has to be read.
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

FAMILIES_MAX = 64  # of one instance
METRICS_MAX = 256  # of one instance, in all families
LABELS_MAX = 16  # of one metric
BUCKETS_MAX = 64  # of one histogram
_CHARACTERS_MAX = 200  # of a name, a label and its value
_DESCRIPTION_CHARACTERS_MAX = 500
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class TritonModelException(Exception):
    """What a model raises, and what Triton's functions raise."""


class _Kind(enum.Enum):
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class _Values:
    """The values of one metric."""

    def __init__(self, family: _Family, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self.family, self.labels, self.buckets = family, dict(labels), list(buckets)
        self.value, self.counts = 0.0, [0] * (len(buckets) + 1)


class _Family:
    def __init__(self, name: str, description: str, kind: _Kind) -> None:
        self.name, self.description, self.kind = name, description, kind
        self.metrics: WeakValueDictionary[tuple[tuple[str, str], ...], _Values] = WeakValueDictionary()


_FAMILIES: WeakValueDictionary[str, _Family] = WeakValueDictionary()


class Metric:
    """One metric of a family. Made by `MetricFamily.Metric`."""

    def __init__(self, values: _Values) -> None:
        self._values = values

    def increment(self, value: float) -> None:
        kind = self._values.family.kind
        if kind is _Kind.HISTOGRAM or (kind is _Kind.COUNTER and value < 0):
            raise TritonModelException(f"metric '{self._values.family.name}' cannot be incremented by {value}")
        self._values.value += float(value)

    def set(self, value: float) -> None:
        if self._values.family.kind is not _Kind.GAUGE:
            raise TritonModelException(f"metric '{self._values.family.name}' is no gauge, which alone can be set")
        self._values.value = float(value)

    def observe(self, value: float) -> None:
        values = self._values
        if values.family.kind is not _Kind.HISTOGRAM:
            raise TritonModelException(f"metric '{values.family.name}' is no histogram, which alone observes")
        values.value += float(value)
        values.counts[bisect_left(values.buckets, value)] += 1

    def value(self) -> float:
        if self._values.family.kind is _Kind.HISTOGRAM:
            raise TritonModelException(f"histogram '{self._values.family.name}' has no single value")
        return self._values.value


class MetricFamily:
    """A family of metrics: a second one of the same name is the same family."""

    COUNTER, GAUGE, HISTOGRAM = _Kind.COUNTER, _Kind.GAUGE, _Kind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: _Kind) -> None:
        if not isinstance(name, str) or not isinstance(description, str) or not isinstance(kind, _Kind):
            raise TypeError("incompatible function arguments: MetricFamily(name: str, description: str, kind)")
        if not _NAME.fullmatch(name) or len(name) > _CHARACTERS_MAX:
            raise TritonModelException(f"'{name[:80]}' is no name of a metric")
        found = _FAMILIES.get(name)
        if found is None:
            if len(_FAMILIES) >= FAMILIES_MAX:
                raise TritonModelException(f"a model may have at most {FAMILIES_MAX} families of metrics")
            text = " ".join(description.split())[:_DESCRIPTION_CHARACTERS_MAX]
            found = _FAMILIES[name] = _Family(name, text, kind)
        if found.kind is not kind:
            raise TritonModelException(f"metric family '{name}' exists already as {found.kind.value}")
        self._family = found

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:  # noqa: N802
        """Return the metric with these labels. Raises TritonModelException."""
        family, labels = self._family, dict(labels or {})
        if (family.kind is _Kind.HISTOGRAM) != bool(buckets):
            raise TritonModelException(f"metric '{family.name}': a histogram has buckets, and nothing else has")
        _check_labels(family.name, labels)
        limits = [float(one) for one in buckets or ()]
        if len(limits) > BUCKETS_MAX or any(a >= b for a, b in pairwise(limits)):
            raise TritonModelException(f"metric '{family.name}': buckets ascend, and are at most {BUCKETS_MAX}")
        key = tuple(sorted(labels.items()))
        values = family.metrics.get(key)
        if values is None:
            if sum(len(one.metrics) for one in list(_FAMILIES.values())) >= METRICS_MAX:
                raise TritonModelException(f"a model may have at most {METRICS_MAX} metrics")
            values = family.metrics[key] = _Values(family, labels, limits)
        return Metric(values)


def _check_labels(name: str, labels: Mapping[Any, Any]) -> None:
    if len(labels) > LABELS_MAX:
        raise TritonModelException(f"metric '{name}': at most {LABELS_MAX} labels")
    for label, value in labels.items():
        if not (isinstance(label, str) and isinstance(value, str)):
            raise TritonModelException(f"metric '{name}': labels and their values are of type str")
        if not _LABEL.fullmatch(label) or max(len(label), len(value)) > _CHARACTERS_MAX:
            raise TritonModelException(f"metric '{name}': '{label[:80]}' is no label, or its value is too long")


def snapshot() -> list[Any]:
    """Return all metrics: [name, kind, description, [labels, value or sum, buckets, counts] of each]."""
    return [
        [
            family.name,
            family.kind.value,
            family.description,
            [[one.labels, one.value, one.buckets, one.counts] for one in list(family.metrics.values())],
        ]
        for family in list(_FAMILIES.values())
    ]
