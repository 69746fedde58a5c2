"""Two readings of the metrics -> rates, quantiles and shares in the time between them. Pure: no clock.

registry.totals() ─> reading_of ─┬─> Growth(before, now) ─> endpoints, totals, busy shares
                  the one before ┘
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from operator import add
from typing import Any, NamedTuple

from millstream.services.metrics import catalogue
from millstream.services.metrics.catalogue import Metric
from millstream.services.metrics.record import Totals

#: outcomes that are the server's fault, as in the dashboards
FAILED = frozenset({"overloaded", "unavailable", "expired", "memory", "model", "storage", "internal"})
P50, P99 = 0.5, 0.99
_BOUNDS = (*catalogue.REQUEST_DURATION.buckets, math.inf)
#: metric -> how many of its labels, the first ones, name what is added up
_READ: dict[Metric, int] = {
    catalogue.REQUEST_DURATION: 2,
    catalogue.BATCH_ROWS: 2,
    catalogue.LANE_ROWS: 2,
    catalogue.INSTANCES_READY: 2,
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
    catalogue.VERSION_REFUSED: 2,
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

Labels = tuple[str, ...]
#: first labels -> values added up
Sums = dict[Labels, list[float]]


class Reading(NamedTuple):
    """The counts at one time. `at_s`: seconds on a clock that only grows; `outcomes`: all, failed, invalid."""

    at_s: float
    sums: dict[str, Sums]
    outcomes: Sums

    def of(self, metric: Metric) -> Sums:
        """Return the sums of a metric of `_READ`."""
        return self.sums.get(metric.name, {})

    def value(self, metric: Metric) -> int:
        """Return the sum of all series of a metric without labels of its own."""
        return int(self.of(metric).get((), (0.0,))[0])


def reading_of(at_s: float, totals: Totals) -> Reading:
    """Return the reading of the counts of all processes."""
    sums: dict[str, Sums] = {name: {} for name in _LABELS}
    outcomes: Sums = {}
    for key, values in totals.items():
        count = _LABELS.get(key.name)
        if count is not None:
            of, labels = sums[key.name], key.labels[:count]
            known = of.get(labels)
            of[labels] = values if known is None or len(known) != len(values) else list(map(add, known, values))
        elif key.name == catalogue.REQUESTS.name:
            model, version, _, outcome = key.labels
            counted = outcomes.setdefault((model, version), [0.0, 0.0, 0.0])
            counted[0] += values[0]
            if outcome != "ok":
                counted[1 if outcome in FAILED else 2] += values[0]
    return Reading(at_s, sums, outcomes)


class Growth:
    """The growth of counters between two readings. A counter that fell, of a server that restarted, grew by nothing.

    `interval_s`: between them; None: there is one reading only, and no rate is known.
    """

    def __init__(self, before: Reading | None, now: Reading) -> None:
        self.now = now
        self.before = before if before is not None and before.at_s < now.at_s else None
        self.interval_s = None if self.before is None else now.at_s - self.before.at_s

    def of(self, metric: Metric, labels: Labels) -> list[float]:
        """Return by how much a series grew; empty: it is not known, or there is none."""
        return self._grown(self.now.of(metric), {} if self.before is None else self.before.of(metric), labels)

    def outcomes(self, labels: Labels) -> list[float]:
        """Return by how much all requests of a version grew, the failed ones, and the invalid ones."""
        return self._grown(self.now.outcomes, {} if self.before is None else self.before.outcomes, labels)

    def _grown(self, now: Sums, before: Sums, labels: Labels) -> list[float]:
        values, old = now.get(labels), before.get(labels)
        if self.before is None or values is None:
            return []
        if old is None or len(old) != len(values):
            return values
        if old == values:  # of most models nothing happens between two readings
            return [0.0] * len(values)
        return [max(0.0, value - earlier) for value, earlier in zip(values, old, strict=True)]

    def rate(self, amount: float) -> float | None:
        """Return an amount a second."""
        return None if self.interval_s is None else amount / self.interval_s

    def busy(self, pool: str, worker: str) -> float | None:
        """Return the share of the time in which a worker ran batches; None: it is of another machine."""
        seconds = self.of(catalogue.WORKER_BUSY_SECONDS, (pool, worker))
        return self.rate(seconds[0]) if seconds else None


def worker_name(worker: str) -> str:
    """Return a worker's name in metrics: its id without the end, which is that of its start."""
    return worker.rpartition("-")[0] or worker


def endpoints(growth: Growth) -> list[dict[str, Any]]:
    """Return what happened to each version that is loaded, has requests that wait, or was called."""
    queued, instances = growth.now.of(catalogue.LANE_ROWS), growth.now.of(catalogue.INSTANCES_READY)
    alive = {key for found in (queued, instances) for key, (value, *_) in found.items() if value}
    alive |= {key for key in growth.now.outcomes if any(growth.outcomes(key))}
    return [_endpoint(growth, key, queued, instances) for key in sorted(alive)]


def _endpoint(growth: Growth, key: Labels, queued: Sums, instances: Sums) -> dict[str, Any]:
    requests, failed, invalid = growth.outcomes(key) or (0.0, 0.0, 0.0)
    durations = growth.of(catalogue.REQUEST_DURATION, key)[:-1]
    *runs, rows = growth.of(catalogue.BATCH_ROWS, key) or (0.0,)
    return {
        "model": key[0],
        "version": key[1],
        "requests_per_s": growth.rate(requests),
        "failed_per_s": growth.rate(failed),
        "invalid_per_s": growth.rate(invalid),
        "p50_s": quantile(durations, P50),
        "p99_s": quantile(durations, P99),
        "batch_rows": rows / sum(runs) if any(runs) else None,
        "queue_rows": int(queued.get(key, (0.0,))[0]),
        "instances": int(instances.get(key, (0.0,))[0]),
    }


def totals(growth: Growth) -> dict[str, Any]:
    """Return what happened to all versions together, refused requests included."""
    now = growth.now
    grown = [growth.outcomes(key) for key in now.outcomes]
    requests, failed, invalid = (sum(one[at] for one in grown if one) for at in range(3))
    refused = sum(sum(growth.of(catalogue.REQUESTS_REFUSED, key)) for key in now.of(catalogue.REQUESTS_REFUSED))
    durations = [0.0] * len(_BOUNDS)
    for key in now.of(catalogue.REQUEST_DURATION):
        grown_by = growth.of(catalogue.REQUEST_DURATION, key)[:-1]
        if any(grown_by):
            durations = list(map(add, durations, grown_by))
    ready = [values[0] > 0 for values in now.of(catalogue.GATEWAY_READY).values()]
    return {
        "requests_per_s": growth.rate(requests),
        "failed_per_s": growth.rate(failed),
        "invalid_per_s": growth.rate(invalid),
        "refused_per_s": growth.rate(refused),
        "p50_s": quantile(durations, P50),
        "p99_s": quantile(durations, P99),
        "in_flight": now.value(catalogue.REQUESTS_IN_FLIGHT),
        "queue_rows": int(sum(values[0] for values in now.of(catalogue.LANE_ROWS).values())),
        "gateways": len(ready),
        "gateways_ready": sum(ready),
        "redis_memory_bytes": now.value(catalogue.REDIS_MEMORY_USED_BYTES),
    }


def quantile(counts: list[float], share: float, bounds: tuple[float, ...] = _BOUNDS) -> float | None:
    """Return a quantile of a histogram as Prometheus' `histogram_quantile` does; None if it is empty.

    Args:
        counts: of observations in each bucket.
        share: of the observations, from 0 to 1.
        bounds: the inclusive upper bound of each bucket, the last one infinite.

    Within a bucket, observations count as evenly spread. Beyond the last finite bound, that bound is returned.
    """
    if not any(counts):
        return None
    upto = list(accumulate(counts))
    rank = share * upto[-1]
    for (lower, upper), (below, above) in zip(pairwise((0.0, *bounds)), pairwise((0.0, *upto)), strict=True):
        if above >= rank and above > below:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / (above - below)
    return bounds[-2]


def existing(reading: Reading, exists: Mapping[str, object]) -> Reading:
    """Return a reading without the versions of models that were deleted."""
    of_versions = {metric.name for metric, count in _READ.items() if metric.labels[:count] == ("model", "version")}
    sums = {
        name: {key: value for key, value in of.items() if key[0] in exists} if name in of_versions else of
        for name, of in reading.sums.items()
    }
    return reading._replace(
        sums=sums, outcomes={key: value for key, value in reading.outcomes.items() if key[0] in exists}
    )
