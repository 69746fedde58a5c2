"""Two readings of a server -> rates, quantiles and shares in the time between them. Pure: no clock, no terminal."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from millstream.plugins.top import reading
from millstream.plugins.top.reading import Reading

#: outcomes that are the server's fault, as in the dashboards
FAILED = frozenset({"overloaded", "unavailable", "expired", "memory", "model", "storage", "internal"})
P50, P99 = 0.5, 0.99
_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EndpointRates:
    """A version of a model. None: not known before the second reading, or nothing was called in between.

    `failed_per_s`: requests that failed by the server's fault; `invalid_per_s`: by the caller's, or cancelled.
    """

    model: str
    version: str
    requests_per_s: float | None
    failed_per_s: float | None
    invalid_per_s: float | None
    p50_s: float | None
    p99_s: float | None
    batch_rows: float | None
    queue_rows: int
    instances: int


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """A worker. `busy`: share of the time in which it ran batches; None for a worker of another machine."""

    worker: str
    pool: str
    device: str
    busy: float | None
    memory_used_bytes: int
    memory_budget_bytes: int | None
    resident_bytes: int | None
    instances: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """All endpoints together, refused requests included. `gateways`: those of the machine that was asked."""

    requests_per_s: float | None
    failed_per_s: float | None
    invalid_per_s: float | None
    refused_per_s: float | None
    p50_s: float | None
    p99_s: float | None
    in_flight: int
    queue_rows: int
    gateways: int
    gateways_ready: int
    redis_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Overview:
    """What happened in the `interval_s` before the second reading; None: there is one reading only.

    Args:
        no_series: why totals and endpoints are not known: the key may not read them. "": they are.
        no_workers: likewise the workers.
    """

    interval_s: float | None
    totals: Totals
    endpoints: list[EndpointRates]
    workers: list[WorkerRates]
    no_series: str = ""
    no_workers: str = ""


def overview(before: Reading | None, now: Reading) -> Overview:
    """Return what happened between two readings."""
    growth = _Growth(before, now)
    return Overview(
        growth.interval_s, _totals(growth), _endpoints(growth), _workers(growth), now.no_series, now.no_workers
    )


class _Growth:
    """The growth of counters between two readings. A counter that fell, of a server that restarted, grew by nothing."""

    def __init__(self, before: Reading | None, now: Reading) -> None:
        elapsed_s = now.at_s - before.at_s if before is not None else 0.0
        self.before = before if elapsed_s > 0 else None
        self.now = now
        self.interval_s = elapsed_s if self.before is not None else None

    def of(self, name: str, *labels: str) -> dict[_Key, float]:
        """Return by how much a series grew, by the values of labels; empty for a first reading."""
        if self.before is None:
            return {}
        old = self.before.sums(name, *labels)
        return {key: max(0.0, value - old.get(key, 0.0)) for key, value in self.now.sums(name, *labels).items()}

    def rate(self, amount: float) -> float | None:
        return None if self.interval_s is None else amount / self.interval_s


def _endpoints(growth: _Growth) -> list[EndpointRates]:
    names = ("model", "version")
    requests, failed, invalid = _by_outcome(growth, *names)
    buckets = growth.of(reading.DURATION, *names, "le")
    by_endpoint: dict[_Key, dict[float, float]] = {}
    for (*key, bound), count in buckets.items():
        by_endpoint.setdefault(tuple(key), {})[float(bound)] = count
    rows, runs = growth.of(reading.ROWS, *names), growth.of(reading.RUNS, *names)
    queued, instances = growth.now.sums(reading.QUEUED, *names), growth.now.sums(reading.INSTANCES, *names)
    alive = {key for found in (requests, queued, instances) for key, value in found.items() if value}
    return [
        EndpointRates(
            model=key[0],
            version=key[1],
            requests_per_s=growth.rate(requests.get(key, 0.0)),
            failed_per_s=growth.rate(failed.get(key, 0.0)),
            invalid_per_s=growth.rate(invalid.get(key, 0.0)),
            p50_s=quantile(by_endpoint.get(key, {}), P50),
            p99_s=quantile(by_endpoint.get(key, {}), P99),
            batch_rows=rows.get(key, 0.0) / runs[key] if runs.get(key) else None,
            queue_rows=int(queued.get(key, 0)),
            instances=int(instances.get(key, 0)),
        )
        for key in sorted(alive)
    ]


def _by_outcome(growth: _Growth, *labels: str) -> tuple[dict[_Key, float], dict[_Key, float], dict[_Key, float]]:
    """Return by labels: all answered requests, those that failed by the server's fault, and by the caller's."""
    all_: dict[_Key, float] = {}
    failed: dict[_Key, float] = {}
    invalid: dict[_Key, float] = {}
    for (*labelled, outcome), count in growth.of(reading.REQUESTS, *labels, "outcome").items():
        key = tuple(labelled)
        all_[key] = all_.get(key, 0.0) + count
        if outcome != "ok":
            failures = failed if outcome in FAILED else invalid
            failures[key] = failures.get(key, 0.0) + count
    return all_, failed, invalid


def _workers(growth: _Growth) -> list[WorkerRates]:
    busy = growth.of(reading.BUSY, "pool", "worker")
    resident = growth.now.sums(reading.RESIDENT, "process")
    found = [_worker(one, growth, busy, resident) for one in growth.now.workers]
    return sorted(found, key=lambda one: (one.pool, one.worker))


def _worker(
    document: dict[str, Any], growth: _Growth, busy: dict[_Key, float], resident: dict[_Key, float]
) -> WorkerRates:
    # The id of a worker ends in that of its start; metrics name workers without it.
    name = document["id"].rpartition("-")[0] or document["id"]
    seconds, memory = busy.get((document["pool"], name)), resident.get((f"worker-{name}",))
    return WorkerRates(
        worker=name,
        pool=document["pool"],
        device=document["device"],
        busy=None if seconds is None else growth.rate(seconds),
        memory_used_bytes=document["used_bytes"],
        memory_budget_bytes=document["budget_bytes"],
        resident_bytes=None if memory is None else int(memory),
        instances=document["instances_total"],
        draining=document["draining"],
    )


def _totals(growth: _Growth) -> Totals:
    requests, failed, invalid = _by_outcome(growth)
    buckets = {float(bound): count for (bound,), count in growth.of(reading.DURATION, "le").items()}
    ready = growth.now.sums(reading.GATEWAYS, "process")
    now = growth.now
    return Totals(
        requests_per_s=growth.rate(requests.get((), 0.0)),
        failed_per_s=growth.rate(failed.get((), 0.0)),
        invalid_per_s=growth.rate(invalid.get((), 0.0)),
        refused_per_s=growth.rate(sum(growth.of(reading.REFUSED).values())),
        p50_s=quantile(buckets, P50),
        p99_s=quantile(buckets, P99),
        in_flight=int(now.sums(reading.IN_FLIGHT).get((), 0)),
        queue_rows=int(now.sums(reading.QUEUED).get((), 0)),
        gateways=len(ready),
        gateways_ready=sum(value > 0 for value in ready.values()),
        redis_memory_bytes=int(now.sums(reading.REDIS_MEMORY).get((), 0)),
    )


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """Return a quantile of a histogram as Prometheus' `histogram_quantile` does; None if it is empty.

    Args:
        buckets: counts of observations up to each inclusive bound, the last bound infinite.
        share: of the observations, from 0 to 1.

    Within a bucket, observations count as evenly spread. Beyond the last finite bound, that bound is returned.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    rank = share * buckets[bounds[-1]]
    for lower, upper in pairwise([0.0, *bounds]):
        below = buckets.get(lower, 0.0)
        if buckets[upper] < rank or buckets[upper] <= below:
            continue
        if upper == float("inf"):
            return lower
        return lower + (upper - lower) * (rank - below) / (buckets[upper] - below)
    return bounds[-2] if len(bounds) > 1 else None
