"""What a lane counts. The handles are made once, so that an update is an addition in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from services.batch import ReplyHeader
from services.errors import Code
from services.manifest import Manifest
from services.metrics import catalogue
from services.metrics.tally import Counter, Tally


class LaneTallies:
    """Series of one version in one pool."""

    def __init__(self, tally: Tally, manifest: Manifest) -> None:
        self._tally = tally
        version = str(manifest.version)
        self._labels = (manifest.model, version, manifest.config.pool)
        self._outcome = (manifest.model, version)
        self._seconds = tally.histogram(catalogue.REQUEST_SECONDS, *self._labels)
        self._queue_wait = tally.histogram(catalogue.QUEUE_WAIT_SECONDS, *self._labels)
        self._ok = tally.counter(catalogue.REQUESTS, *self._outcome, "ok")
        self._batches_ok = tally.counter(catalogue.BATCHES, *self._labels, "ok")
        self._batches_failed = tally.counter(catalogue.BATCHES, *self._labels, "failed")
        self.refused_full: Counter = tally.counter(catalogue.REFUSED, "lane_full")
        self.refused_late: Counter = tally.counter(catalogue.REFUSED, "deadline")
        self.segment_bytes: Counter = tally.counter(catalogue.SEGMENT_BYTES, "gateway_out")
        self.waiting = tally.gauge(catalogue.LANE_ROWS, *self._labels)
        self.instances = tally.gauge(catalogue.INSTANCES_READY, *self._labels)

    def batch(self, header: ReplyHeader, requests: int) -> None:
        """A batch of so many requests, canaries not counted, came back: each of them waited as long in the stream."""
        self._queue_wait.observe(header.queue_s, requests)
        (self._batches_failed if header.failures else self._batches_ok).add()

    def answered(self, seconds: list[float]) -> None:
        """Requests of one batch, answered now. They took about as long as one another: few buckets, one update each."""
        if not seconds:
            return
        seconds.sort()
        at, count = 0, len(seconds)
        while at < count:
            # All of a bucket at once, at their mean: the bucket counts and the sum are those of single observations.
            end = bisect_right(seconds, self._bound_of(seconds[at]), at)
            self._seconds.observe(sum(seconds[at:end]) / (end - at), end - at)
            at = end
        self._ok.add(count)

    @staticmethod
    def _bound_of(seconds: float) -> float:
        """The upper bound, inclusive, of the bucket that `seconds` falls into."""
        bounds = catalogue.REQUEST_SECONDS.buckets
        at = bisect_left(bounds, seconds)
        return bounds[at] if at < len(bounds) else float("inf")

    def failed(self, code: Code, seconds: float) -> None:
        self._seconds.observe(seconds)
        self._tally.counter(catalogue.REQUESTS, *self._outcome, code.value).add()

    def turned_away(self, code: Code) -> None:
        """An outcome without a time: how fast mistakes are refused says nothing about how long answers take."""
        self._tally.counter(catalogue.REQUESTS, *self._outcome, code.value).add()

    def close(self) -> None:
        for metric in (catalogue.LANE_ROWS, catalogue.INSTANCES_READY):
            self._tally.remove(metric, *self._labels)
