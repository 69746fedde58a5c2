"""Two readings of the metrics -> rates, quantiles and shares in the time between them. Pure: no clock.

registry.parts() ─> Counts.read ─┬─> Growth(before, now) ─> endpoints, totals, busy shares
                  the one before ┘
Of 1,000 models most do nothing between two readings: only what changed is added up, and taken apart again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple

from millstream.services.metrics import catalogue
from millstream.services.metrics.catalogue import Metric
from millstream.services.metrics.files import Part
from millstream.services.metrics.registry import quantile

#: outcomes that are the server's fault, as in the dashboards
FAILED = frozenset({"overloaded", "unavailable", "expired", "memory", "model", "storage", "internal"})
P50, P99 = 0.5, 0.99
_BOUNDS = (*catalogue.REQUEST_DURATION.buckets, math.inf)
#: metric -> how many of its labels, the first ones, name what is added up
_READ: dict[Metric, int] = {
    catalogue.REQUEST_DURATION: 2,
    catalogue.BATCH_ROWS: 2,
    catalogue.LANE_ROWS: 2,
    catalogue.REQUESTS: 2,
    catalogue.INSTANCES_READY: 3,  # the largest of all processes, of each pool
    catalogue.WORKER_BUSY_SECONDS: 2,
    catalogue.PROCESS_RESIDENT_BYTES: 1,
    catalogue.PROCESS_OPEN_FDS: 1,
    catalogue.PROCESS_MAX_FDS: 1,
    catalogue.GATEWAY_READY: 1,
    catalogue.REDIS_UP: 1,
    catalogue.REQUESTS_REFUSED: 1,
    catalogue.WORKERS_WANTED: 1,
    catalogue.WORKERS_READY: 1,
    catalogue.BATCHES_RECLAIMED: 1,
    catalogue.BATCHING_OFF: 2,
    catalogue.VERSION_REFUSED: 3,
    catalogue.TLS_CERTIFICATE_EXPIRY: 1,
    catalogue.KEY_EXPIRY: 1,
    catalogue.CONTROLLER_LEADS: 0,
    catalogue.REQUESTS_QUARANTINED: 0,
    catalogue.REDIS_MEMORY_LIMIT_BYTES: 0,
    catalogue.REQUESTS_IN_FLIGHT: 0,
    catalogue.REDIS_MEMORY_USED_BYTES: 0,
}
#: of processes, by their names
RESIDENT = catalogue.PROCESS_RESIDENT_BYTES
_LABELS = {metric.name: count for metric, count in _READ.items()}
#: names of the metrics that are read
WANTED = frozenset(_LABELS)
_OF_MODELS = {metric.name for metric in _READ if metric.labels[:1] == ("model",)}

Labels = tuple[str, ...]
Values = Sequence[float]
#: first labels -> values added up
Sums = dict[Labels, Values]


class Reading(NamedTuple):
    """The counts at one time. `at_s`: seconds on a clock that only grows.

    The values of catalogue.REQUESTS are those of all requests, of the failed and of the invalid ones. Values that one
    process alone has, and that did not change, are the same objects as in the reading before.
    """

    at_s: float
    sums: Mapping[str, Sums]

    def of(self, metric: Metric) -> Sums:
        """Return the sums of a metric of `_READ`."""
        return self.sums.get(metric.name, {})

    def value(self, metric: Metric) -> int:
        """Return the sum of all series of a metric without labels of its own."""
        return int(self.of(metric).get((), (0.0,))[0])

    def instances(self) -> dict[Labels, int]:
        """Return how many instances of each version are ready, in all pools; those of which there are none may lack."""
        found: dict[Labels, int] = {}
        for (model, version, _), (count, *_) in self.of(catalogue.INSTANCES_READY).items():
            if count:
                found[model, version] = found.get((model, version), 0) + int(count)
        return found


class Counts:
    """Adds up the parts of the metrics, which are those of several processes: a part that did not change, once."""

    def __init__(self) -> None:
        self._parts: dict[Any, tuple[Part, dict[tuple[str, Labels], Values]]] = {}

    def read(self, at_s: float, parts: Mapping[Any, Part], exists: Collection[str]) -> Reading:
        """Return the sums of the current parts, which are named as the last time, for the models that exist."""
        before = self._parts
        self._parts = {
            where: before[where] if where in before and before[where][0] is part else (part, _added_up(part))
            for where, part in parts.items()
        }
        sums: dict[str, Sums] = {name: {} for name in _LABELS}
        for _, found in self._parts.values():
            for (name, labels), values in found.items():
                if name not in _OF_MODELS or labels[0] in exists:
                    sums[name][labels] = _merged(name, sums[name].get(labels), values)
        return Reading(at_s, sums)


_LARGEST = {metric.name for metric in _READ if metric.kind.largest}


def _added_up(part: Part) -> dict[tuple[str, Labels], Values]:
    found: dict[tuple[str, Labels], Values] = {}
    for key, values in part.series:
        count = _LABELS.get(key.name)
        if count is None or not (part.alive or key.kind.lasting):
            continue
        if key.name == catalogue.REQUESTS.name:
            outcome, number = key.labels[3], values[0]
            failed = outcome in FAILED
            values = number, number if failed else 0.0, 0.0 if failed or outcome == "ok" else number
        name = key.name, key.labels[:count]
        found[name] = _merged(key.name, found.get(name), values)
    return found


def _merged(name: str, known: Values | None, values: Values) -> Values:
    if known is None or len(known) != len(values):
        return values
    return tuple(map(max if name in _LARGEST else add, known, values))


class Growth:
    """The growth of counters between two readings. A counter that fell, of a server that restarted, grew by nothing.

    `interval_s`: between them; None: there is one reading only, and no rate is known.
    """

    def __init__(self, before: Reading | None, now: Reading) -> None:
        self.now = now
        self.before = before if before is not None and before.at_s < now.at_s else None
        self.interval_s = None if self.before is None else now.at_s - self.before.at_s
        self._grown: dict[str, dict[Labels, Values]] = {}

    def all(self, metric: Metric) -> Mapping[Labels, Values]:
        """Return by how much those series grew that did."""
        found = self._grown.get(metric.name)
        if found is None:
            before = {} if self.before is None else self.before.of(metric)
            now = {} if self.before is None else self.now.of(metric)
            pairs = ((labels, values, before.get(labels)) for labels, values in now.items())
            found = {labels: _growth(values, old) for labels, values, old in pairs if values is not old}
            found = self._grown[metric.name] = {labels: grown for labels, grown in found.items() if any(grown)}
        return found

    def of(self, metric: Metric, labels: Labels) -> Values:
        """Return by how much a series grew; empty: not at all, or it is not known."""
        return self.all(metric).get(labels, ())

    def queued(self) -> dict[Labels, int]:
        """Return the rows that wait now, of the versions that have some."""
        return {key: int(rows) for key, (rows, *_) in self.now.of(catalogue.LANE_ROWS).items() if rows}

    def rate(self, amount: float) -> float | None:
        """Return an amount a second."""
        return None if self.interval_s is None else amount / self.interval_s

    def busy(self, pool: str, worker: str) -> float | None:
        """Return the share of the time in which a worker ran batches; None: it is of another machine."""
        if (pool, worker) not in self.now.of(catalogue.WORKER_BUSY_SECONDS):
            return None
        return self.rate(sum(self.of(catalogue.WORKER_BUSY_SECONDS, (pool, worker))))


def _growth(values: Values, old: Values | None) -> Values:
    if old is None or len(old) != len(values):
        return values
    return [max(0.0, value - earlier) for value, earlier in zip(values, old, strict=True)]


def worker_name(worker: str) -> str:
    """Return a worker's name in metrics: its id without the end, which is that of its start."""
    return worker.rpartition("-")[0] or worker


def figures(growth: Growth, versions: Iterable[Labels]) -> dict[str, float | None]:
    """Return the rates and quantiles of the requests of some versions together."""
    keys = list(versions)
    requests = _sum(growth.of(catalogue.REQUESTS, key) for key in keys) or (0.0, 0.0, 0.0)
    durations = _sum(growth.of(catalogue.REQUEST_DURATION, key) for key in keys)[:-1]
    names = ("requests_per_s", "failed_per_s", "invalid_per_s")
    rates = dict(zip(names, map(growth.rate, requests), strict=True))
    return rates | {"p50_s": quantile(durations, P50, _BOUNDS), "p99_s": quantile(durations, P99, _BOUNDS)}


def _sum(rows: Iterable[Values]) -> list[float]:
    """Return the sums of columns, without rows that did not grow. Another release may have other buckets."""
    return [sum(column) for column in zip(*filter(None, rows), strict=False)]


def endpoints(growth: Growth) -> list[dict[str, Any]]:
    """Return what happened to each version that is loaded, has requests that wait, or was called."""
    queued, instances, called = growth.queued(), growth.now.instances(), growth.all(catalogue.REQUESTS)
    quiet = figures(growth, ()) | {"batch_rows": None}
    return [
        {
            "model": key[0],
            "version": key[1],
            **(figures(growth, (key,)) | {"batch_rows": _batch_rows(growth, key)} if key in called else quiet),
            "queue_rows": queued.get(key, 0),
            "instances": instances.get(key, 0),
        }
        for key in sorted(queued.keys() | instances.keys() | called.keys())
    ]


def _batch_rows(growth: Growth, key: Labels) -> float | None:
    *runs, rows = growth.of(catalogue.BATCH_ROWS, key) or (0.0,)
    return rows / sum(runs) if any(runs) else None


def totals(growth: Growth) -> dict[str, Any]:
    """Return what happened to all versions together, refused requests included."""
    now = growth.now
    ready = [values[0] > 0 for values in now.of(catalogue.GATEWAY_READY).values()]
    return {
        **figures(growth, growth.all(catalogue.REQUESTS)),
        "refused_per_s": growth.rate(sum(map(sum, growth.all(catalogue.REQUESTS_REFUSED).values()))),
        "in_flight": now.value(catalogue.REQUESTS_IN_FLIGHT),
        "queue_rows": sum(growth.queued().values()),
        "gateways": len(ready),
        "gateways_ready": sum(ready),
        "redis_memory_bytes": now.value(catalogue.REDIS_MEMORY_USED_BYTES),
    }
