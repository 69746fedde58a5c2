"""Finished requests -> spans -> a collector, in a thread of its own.

add (event loop): a reference ─> buffer (bounded) ─> thread: spans_of ─> SpanExporter ─> counted
The event loop keeps a reference for each sampled request and does nothing else. A collector that is slow or away costs
spans, which are counted, and never a request. The exporters of OpenTelemetry try again by themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from millstream.gateway.observing.finished import Finished
from millstream.gateway.observing.observer import Wants
from millstream.services.metrics.catalogue import TRACED_REQUESTS_DROPPED, TRACES_SPANS_EXPORTED
from millstream.services.metrics.registry import MetricsRegistry

log = logging.getLogger("millstream.tracing")

BUFFER_MAX = 4096  # finished requests that wait to be exported; further ones are dropped and counted
EXPORT_MAX = 64  # requests of one export: encoding more would hold the interpreter's lock for long
EXPORT_S = 0.5  # at most this long a request waits for others to share its export
DEFECT_S = 60.0  # between two log records about traces that could not be made
CLOSE_S_MAX = 3.0  # time for what waits when the gateway stops

SpansOf = Callable[[Iterable[Finished], int], Iterable[ReadableSpan]]


class Tracer:
    """Exports the traces of one gateway.

    Args:
        exporter: sends spans. It may block.
        spans_of: makes the spans of requests; the second argument is what Unix time is ahead of their clock, in
            nanoseconds.
        registry: counts exported spans and dropped requests.
        wants: selects the requests.
    """

    traces = True

    def __init__(
        self, exporter: SpanExporter, spans_of: SpansOf, registry: MetricsRegistry, wants: Wants | None = None
    ) -> None:
        self.wants = wants
        self._exporter = exporter
        self._spans_of = spans_of
        self._buffer: deque[Finished] = deque()
        # Each series is written by one thread.
        self._full = registry.counter(TRACED_REQUESTS_DROPPED, "buffer_full")
        self._failed = registry.counter(TRACED_REQUESTS_DROPPED, "export_failed")
        self._exported = registry.counter(TRACES_SPANS_EXPORTED)
        self._away = False  # the last export failed
        self._defect_at = float("-inf")  # when one was logged
        self._added = threading.Event()
        self._close_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: Finished) -> None:
        """Take a sampled request. Called in the event loop."""
        if len(self._buffer) >= BUFFER_MAX:
            self._full.add()
            return
        self._buffer.append(request)
        if len(self._buffer) == EXPORT_MAX:
            self._added.set()

    def close(self) -> None:
        """Export what waits, for at most CLOSE_S_MAX, and end the thread. Blocks."""
        self._close_at = time.monotonic() + CLOSE_S_MAX
        self._added.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S_MAX)
            self._exporter.shutdown()  # ends the pause before a further attempt, too
            self._thread.join(1.0)

    def _run(self) -> None:
        while self._close_at == float("inf"):
            self._added.wait(EXPORT_S)
            self._added.clear()
            while self._buffer and time.monotonic() < self._close_at:
                taken = [self._buffer.popleft() for _ in islice(range(len(self._buffer)), EXPORT_MAX)]
                try:
                    self._export(taken)
                except Exception:  # a defect must not end the thread: traces would stop without a word
                    self._failed.add(len(taken))
                    if time.monotonic() >= self._defect_at + DEFECT_S:
                        self._defect_at = time.monotonic()
                        log.exception("%d traces could not be made", len(taken))
        self._failed.add(len(self._buffer))

    def _export(self, requests: list[Finished]) -> None:
        spans = list(self._spans_of(requests, time.time_ns() - time.monotonic_ns()))
        taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if taken:
            self._exported.add(len(spans))
        else:
            self._failed.add(len(requests))
        if taken and self._away:
            log.info("traces are exported again")
        elif not taken and not self._away:  # said once, until an export succeeds
            log.warning(
                "%d traces could not be exported; further ones are dropped and counted until the collector answers",
                len(requests),
            )
        self._away = not taken
