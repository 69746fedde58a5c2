"""The metrics of a lane. Handles are made once, so that an update is an addition in memory."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

from millstream.services.errors import Code
from millstream.services.metrics import catalogue, inference
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.metrics.inference import FAILED, REASONS, Field, Reason
from millstream.services.metrics.registry import Counter, CounterVector, Gauge, Histogram, MetricsRegistry
from millstream.services.model.manifest import Manifest
from millstream.services.wire.batch import ReplyHeader


class _ProtocolSeries(NamedTuple):
    """The series of a lane's requests of one protocol."""

    seconds: Histogram
    ok: Counter


class LaneMetrics:
    """The series of one version in one pool, and of its content id."""

    _queue_wait: Histogram
    _protocols: dict[str, _ProtocolSeries]
    _batches_ok: Counter
    _batches_failed: Counter
    _sums: CounterVector
    _last: Gauge
    _waiting: Gauge
    _pending: Gauge

    def __init__(self, registry: MetricsRegistry, manifest: Manifest, pool: str, *, lazy: bool = False) -> None:
        """`lazy`: create the series of requests with the first request, so that an idle version has none."""
        self._registry = registry
        version = str(manifest.version)
        self._labels = (manifest.model, version, pool)
        self._off = False
        self._version = (manifest.model, version)
        self._of_content = (manifest.model, version, manifest.content_id)
        self._runs: dict[int, CounterVector] = {}
        self._pending_shown = 0
        self.refused_full: Counter = registry.counter(catalogue.REQUESTS_REFUSED, "lane_full")
        self.refused_late: Counter = registry.counter(catalogue.REQUESTS_REFUSED, "deadline")
        self.segment_bytes: Counter = registry.counter(catalogue.SEGMENT_BYTES, "gateway_out")
        self.refused = registry.gauge(catalogue.VERSION_REFUSED, *self._labels)
        self.instances = registry.gauge(catalogue.INSTANCES_READY, *self._labels)
        #: Whether no instance is ready: requests that end meanwhile found their model not loaded.
        self.unloaded = False
        self._load_waited = 0  # requests that waited for the last load and are not answered yet
        self._opened = False
        if not lazy:
            self._open()

    def __getattr__(self, name: str) -> Any:
        """Create the series of requests at the first use of one: an attribute that exists is not looked up here."""
        if name not in LaneMetrics.__annotations__:
            raise AttributeError(name)
        self._open()
        return self.__dict__[name]

    def _open(self) -> None:
        registry = self._registry
        self._opened = True
        self._queue_wait = registry.histogram(catalogue.QUEUE_WAIT_SECONDS, *self._labels)
        self._protocols = {RequestProtocol.V2: self._protocol_series(RequestProtocol.V2)}
        self._batches_ok = registry.counter(catalogue.BATCHES, *self._labels, "ok")
        self._batches_failed = registry.counter(catalogue.BATCHES, *self._labels, "failed")
        self._sums = registry.counter_vector(inference.REQUESTS, *self._of_content)
        self._last = registry.latest(inference.LAST, *self._of_content)
        self._waiting = registry.gauge(catalogue.LANE_ROWS, *self._labels)
        self._pending = registry.gauge(inference.PENDING, *self._of_content)

    def _of(self, protocol: str) -> _ProtocolSeries:
        """Return the series of a protocol; they are created at its first request."""
        series = self._protocols.get(protocol)
        if series is None:
            series = self._protocols[protocol] = self._protocol_series(protocol)
        return series

    def _protocol_series(self, protocol: str) -> _ProtocolSeries:
        registry = self._registry
        return _ProtocolSeries(
            registry.histogram(catalogue.REQUEST_DURATION, *self._labels, protocol),
            registry.counter(catalogue.REQUESTS, *self._version, protocol, "ok"),
        )

    @property
    def answered_requests(self) -> float:
        """Requests of the version that were answered, by all its lanes."""
        return self._sums.values[self._sums.slot + Field.SUCCESS]

    def batching_off(self, off: bool) -> None:
        """Show whether each request runs alone although the version's signature allows batching."""
        if off is not self._off:
            self._off = off
            if off:
                self._registry.gauge(catalogue.BATCHING_OFF, *self._version).set(1)
            else:
                self._registry.remove(catalogue.BATCHING_OFF, *self._version)

    def cold(self) -> None:
        """Count a request that found no ready instance. The series is created at the first."""
        self._registry.counter(catalogue.COLD_REQUESTS, *self._labels).add()

    def loaded(self, waited_s: Iterable[float]) -> None:
        """Count how long requests waited until an instance was ready."""
        observe = self._registry.histogram(catalogue.LOAD_WAIT_SECONDS, *self._labels).observe
        for seconds in waited_s:
            observe(seconds)
            self._load_waited += 1

    def _missed(self, requests: int) -> None:
        """Count requests that end and for which the model was not loaded, among `requests` that end."""
        if not self.unloaded:
            requests = min(requests, self._load_waited)
            self._load_waited -= requests
        self._registry.counter(catalogue.CACHE_MISSES, *self._version).add(requests)

    def waiting(self, requests: int, rows: int) -> None:
        """Show how many requests and rows wait."""
        if not requests and not self._opened:
            return
        self._pending.add(requests - self._pending_shown)  # shared with the version's lanes in other pools
        self._waiting.set(rows)
        self._pending_shown = requests

    def batch(self, header: ReplyHeader, requests: int) -> None:
        """Count the reply to a batch of `requests` (probes excluded), which all waited equally long in the stream."""
        if not requests and not self._opened:  # a readiness probe of a version that was never called
            return
        self._queue_wait.observe(header.queue_s, requests)
        (self._batches_failed if header.failures else self._batches_ok).add()
        if header.runs and requests:
            self.ran(header)

    def ran(self, header: ReplyHeader) -> None:
        """Count the runs of a reply. The parts of a bisected run share its time in proportion to their rows."""
        self._sums.add_to(Field.EXECUTIONS, len(header.runs))
        self._last.set(time.time())  # noqa: TID251 - shown to people
        rows_total = sum(header.runs) or 1
        for rows in header.runs:
            share = rows / rows_total
            sums = self._runs.get(rows)
            if sums is None:
                label = inference.rows_label(rows)
                sums = self._runs[rows] = self._registry.counter_vector(inference.RUNS, *self._of_content, label)
            sums.add(1.0, header.input_s * share, header.infer_s * share, header.output_s * share)

    def answered(self, protocol: str, seconds: list[float], rows: int, header: ReplyHeader, since_put_s: float) -> None:
        """Count answered requests of one batch. Their times are similar, so only a few buckets are updated.

        Args:
            protocol: of all these requests.
            seconds: from arrival to answer, per request; sorted in place.
            rows: rows of all these requests.
            header: the header of the batch's reply.
            since_put_s: seconds since the batch was put.
        """
        if not seconds:
            return
        total, count = sum(seconds), len(seconds)
        waited = max(0.0, total - count * (since_put_s - header.queue_s))
        self._sums.add(
            count, total, waited, header.input_s * count, header.infer_s * count, header.output_s * count, rows
        )
        if self._load_waited:
            self._missed(count)
        series = self._protocols.get(protocol) or self._of(protocol)
        observe = series.seconds.observe
        seconds.sort()
        at = 0
        while at < count:
            # One observation per bucket, at the mean: bucket counts and sum equal those of single observations.
            end = bisect_right(seconds, self._bound_of(seconds[at]), at)
            observe(sum(seconds[at:end]) / (end - at), end - at)
            at = end
        series.ok.add(count)

    def answered_without_run(self, protocol: str, seconds: float) -> None:
        """Count a request for no rows."""
        series = self._of(protocol)
        series.seconds.observe(seconds)
        self._sums.add(1, seconds, 0.0, 0.0, 0.0, 0.0, 0)
        series.ok.add()

    @staticmethod
    def _bound_of(seconds: float) -> float:
        """Return the inclusive upper bound of the bucket of `seconds`."""
        bounds = catalogue.REQUEST_DURATION.buckets
        at = bisect_left(bounds, seconds)
        return bounds[at] if at < len(bounds) else float("inf")

    def failed(self, protocol: str, code: Code, seconds: float, reason: Reason | None = None) -> None:
        self._of(protocol).seconds.observe(seconds)
        self._sums.add_to(Field.FAIL_S, seconds)
        self.record_rejection(protocol, code, reason)

    def record_rejection(self, protocol: str, code: Code, reason: Reason | None = None) -> None:
        """Count a refused request, without its time: a refusal does not show how long answers take."""
        if self.unloaded or self._load_waited:
            self._missed(1)
        self._registry.counter(catalogue.REQUESTS, *self._version, protocol, code.value).add()
        self._sums.add_to(FAILED[reason or REASONS.get(code, Reason.OTHER)])

    def overflowed(self, requests: int) -> None:
        """Count requests that another pool took over."""
        self._registry.counter(catalogue.REQUESTS_OVERFLOWED, *self._labels).add(requests)

    def close(self, *, version_removed: bool) -> None:
        """Remove the gauges. `version_removed` False: the version's lanes in other pools keep theirs."""
        self.waiting(0, 0)
        for metric in (catalogue.LANE_ROWS, catalogue.INSTANCES_READY):
            self._registry.remove(metric, *self._labels)
        if version_removed:
            self.batching_off(False)
            self._registry.remove(inference.PENDING, *self._of_content)
