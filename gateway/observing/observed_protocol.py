"""observed_protocol: the fast path's protocol class with an observer. A gateway without observer has the plain class.

_submit: instant, trace ─> InferHandler ……… _answer: status, bytes, the lane's times ─> Observer.finish
"""

from __future__ import annotations

import time
from typing import Any, ClassVar, TypeVar

from millstream.gateway.connection.http_counts import INFER_ROUTE, INFER_VERSION_ROUTE
from millstream.gateway.connection.infer_handler import HttpReply, InferHeaders
from millstream.gateway.connection.request_cycle import RequestCycle
from millstream.gateway.observing.finished import CANCELLED_STATUS, PATH_MAX, Finished
from millstream.gateway.observing.observer import Observer

_Protocol = TypeVar("_Protocol", bound=type)
#: makes a NamedTuple in a third of the time that `_replace` takes
_new = tuple.__new__


class _Observed:
    """Overrides of FastPathProtocol."""

    observer: ClassVar[Observer]

    def _submit(self, cycle: Any, body: bytes) -> None:
        cycle.submitted_at = time.monotonic()
        headers = cycle.headers
        traceparent = self.observer.traceparent(headers.traceparent)
        if traceparent is not headers.traceparent:
            cycle.headers = _new(InferHeaders, (*headers[:-1], traceparent))  # `traceparent` is the last field
        super()._submit(cycle, body)  # type: ignore[misc]

    def _answer(self, cycle: Any, reply: HttpReply) -> int:
        ticket = cycle.ticket
        status: int = super()._answer(cycle, reply)  # type: ignore[misc]
        if status:
            self._finished(cycle, ticket, status, len(reply.body))
        return status

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self._active, self.cycle):  # type: ignore[attr-defined]
            if type(cycle) is RequestCycle and cycle.ticket is not None and not cycle.answered:
                self._finished(cycle, cycle.ticket, CANCELLED_STATUS, 0)
                break  # the request that was read last may be the active one
        super().connection_lost(exc)  # type: ignore[misc]

    def _finished(self, cycle: Any, ticket: Any, status: int, reply_bytes: int) -> None:
        model, version = cycle.path
        if model:
            route = INFER_ROUTE if version is None else INFER_VERSION_ROUTE
            path = f"/v2/models/{model}{'' if version is None else f'/versions/{version}'}/infer"[:PATH_MAX]
        else:
            route = path = ""  # its head was refused
        now = time.monotonic()
        client = self.client  # type: ignore[attr-defined]
        self.observer.finish(
            Finished(
                "http",
                "POST",
                route,
                path,
                status,
                cycle.submitted_at or now,
                now,
                (cycle.request_id or b"").decode("ascii"),
                cycle.headers.traceparent,
                client[0] if client else "",
                reply_bytes,
            ),
            () if ticket is None else (ticket,),
        )


def with_observer(protocol: _Protocol, observer: Observer | None) -> _Protocol:
    """Return the protocol class of a server with an observer; without one, `protocol`."""
    if observer is None:
        return protocol
    made: _Protocol = type(protocol.__name__, (_Observed, protocol), {"observer": observer})  # type: ignore[assignment]
    return made
