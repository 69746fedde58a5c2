"""Passes the finished calls of a gateway on to what records them.

begin: trace, instant ─> … ─> end: instant, status ─> takers ─none──> nothing is built: most calls are not sampled
                                                          └─some──> Finished, with its runs ─> their `add`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from random import getrandbits
from typing import Any, Protocol

from millstream.gateway.observing.finished import Finished, key_of, runs_of
from millstream.services.traceparent import Trace

log = logging.getLogger("millstream.gateway")


class Wants(Protocol):
    """Says whether a sink takes a finished call. It runs for each call, in the event loop."""

    def __call__(self, trace: Trace, seconds: float, now: float, *, failed: bool, reads: bool) -> bool:
        """Return whether it takes a call.

        Args:
            trace: that the call belongs to.
            seconds: how long it took.
            now: when it ended, in seconds on the monotonic clock.
            failed: whether the server failed, or refused because of overload.
            reads: whether it is a GET or HEAD.
        """


class CallSink(Protocol):
    """Takes finished calls, in the event loop.

    `wants`: selects calls; None: it takes all. Where a sink selects, calls that belong to no trace begin one.
    """

    wants: Wants | None

    def start(self) -> None:
        """Start its thread."""

    def add(self, request: Finished) -> None:
        """Take a call."""

    def close(self) -> None:
        """Pass on what waits, and end the thread. Blocks for some seconds at most."""


Takers = tuple[CallSink, ...]


def guarded(record: Callable[..., None], *arguments: Any) -> None:
    """Call what records a request. Its defect is logged, and costs no request its answer."""
    try:
        record(*arguments)
    except Exception:
        log.exception("a request could not be recorded")


class Observer:
    """Passes finished calls on to `sinks`."""

    def __init__(self, sinks: Sequence[CallSink]) -> None:
        self._takes_all: Takers = tuple(sink for sink in sinks if sink.wants is None)
        self._selects = tuple((sink.wants, sink) for sink in sinks if sink.wants is not None)

    def trace(self, sent: bytes | None) -> Trace | None:
        """Return the trace that a call belongs to: that of its caller (`sent`), else a new one if traces are on."""
        return getrandbits(128) or 1 if sent is None and self._selects else sent

    def takers(self, trace: Trace | None, started: float, ended: float, *, failed: bool, reads: bool = False) -> Takers:
        """Return what takes a finished call: call `finish` for it unless there is nothing.

        Args:
            trace: of `trace`.
            started: when the call was read, in seconds on the monotonic clock.
            ended: when its reply was written.
            failed: whether the server failed, or refused because of overload.
            reads: whether it is a GET or HEAD.
        """
        takers = self._takes_all
        if trace is not None:
            for wants, sink in self._selects:
                if wants(trace, ended - started, ended, failed=failed, reads=reads):
                    takers = (*takers, sink)
        return takers

    @staticmethod
    def finish(takers: Takers, request: Finished, tickets: Iterable[Any]) -> None:
        """Pass a call on to its takers. `tickets`: the handles on its inference requests."""
        whole = Finished(*request[:-2], request.key or key_of(tickets), runs_of(tickets))
        for taker in takers:
            guarded(taker.add, whole)
