"""observer: takes each finished request of a gateway and passes it on to its tracer and its access log."""

from __future__ import annotations

from collections.abc import Iterable
from random import getrandbits
from typing import Any, Protocol

from millstream.gateway.observing.finished import Finished, runs_of
from millstream.services.tracing.traceparent import new_traceparent


class Sink(Protocol):
    """Takes finished requests, in the event loop."""

    def wants(self, request: Finished) -> bool:
        """Whether it takes a request, which has no runs yet."""

    def add(self, request: Finished) -> None:
        """Take a request."""


class Observer:
    """Passes finished requests on.

    Args:
        sinks: the tracer and the access log, where they are on.
        traced: whether requests without a traceparent begin a trace.
    """

    def __init__(self, sinks: Iterable[Sink], *, traced: bool) -> None:
        self._sinks = tuple(sinks)
        self._traced = traced

    def traceparent(self, sent: bytes | None) -> bytes | None:
        """Return the trace that a request belongs to: that of its caller (`sent`), else a new one if traces are on."""
        return new_traceparent(getrandbits(128)) if sent is None and self._traced else sent

    def finish(self, request: Finished, tickets: Iterable[Any]) -> None:
        """Take a request whose reply was written, and the handles on its inference requests.

        Most requests are not sampled: the runs are read only of those that a sink takes.
        """
        sinks = [sink for sink in self._sinks if sink.wants(request)]
        if sinks:
            whole = Finished(*request[:-1], runs_of(tickets))
            for sink in sinks:
                sink.add(whole)
