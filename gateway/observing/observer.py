"""observer: passes the finished requests of a gateway on to its tracer and its access log.

begin: trace, instant ─> … ─> end: instant, status ─> takers ─none──> nothing is built: most requests are not sampled
                                                          └─some──> Finished, with its runs ─> tracer, access log
"""

from __future__ import annotations

from collections.abc import Iterable
from random import getrandbits
from typing import Any, Protocol

from millstream.gateway.observing.finished import Finished, key_of, runs_of
from millstream.plugins.tracing.sampler import Sampler
from millstream.services.traceparent import Trace


class Sink(Protocol):
    """Takes finished requests, in the event loop."""

    def add(self, request: Finished) -> None:
        """Take a request."""


Takers = tuple[Sink, ...]


class Observer:
    """Passes finished requests on.

    Args:
        sampler: selects the requests that the tracer takes; None: traces are off, and requests begin none.
        sinks: the tracer, where traces are on, and the access log, where it is on.
    """

    def __init__(self, sampler: Sampler | None, sinks: Takers) -> None:
        self._sampler = sampler
        self._traced = sinks
        self._untraced = sinks if sampler is None else sinks[1:]

    def trace(self, sent: bytes | None) -> Trace | None:
        """Return the trace that a request belongs to: that of its caller (`sent`), else a new one if traces are on."""
        return getrandbits(128) or 1 if sent is None and self._sampler is not None else sent

    def takers(self, trace: Trace | None, started: float, ended: float, *, failed: bool, reads: bool = False) -> Takers:
        """Return what takes a finished request: call `finish` for it unless there is nothing.

        Args:
            trace: of `trace`.
            started: when the request was read, in seconds on the monotonic clock.
            ended: when its reply was written.
            failed: whether the server failed, or refused because of overload.
            reads: whether it is a GET or HEAD.
        """
        sampler = self._sampler
        if sampler is None or trace is None:
            return self._untraced
        traced = sampler.selected(trace, ended - started, ended, failed=failed, reads=reads)
        return self._traced if traced else self._untraced

    @staticmethod
    def finish(takers: Takers, request: Finished, tickets: Iterable[Any]) -> None:
        """Pass a request on to its takers. `tickets`: the handles on its inference requests."""
        whole = Finished(*request[:-2], request.key or key_of(tickets), runs_of(tickets))
        for taker in takers:
            taker.add(whole)
