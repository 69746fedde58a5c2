"""The requests over HTTP as an observer sees them: those of all routes, and those of the fast path.

ObservedApp, a middleware: started ─> route ─> reply has ended ─> Observer.finish
with_observer, of the protocol class: _submit: instant, trace ─> InferHandler ……… _answer: status, bytes ─> the same
While the observer has no sinks, the protocol class has none of these overrides.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, ClassVar, TypeVar

from millstream.gateway.access.principal import caller_name
from millstream.gateway.connection.http_counts import INFER_ROUTE, INFER_VERSION_ROUTE
from millstream.gateway.connection.infer_handler import METHOD, HttpReply
from millstream.gateway.connection.reply_order import RequestCycle
from millstream.gateway.observing.finished import CANCELLED_STATUS, FAILED_HTTP, PATH_MAX, TICKETS, Finished
from millstream.gateway.observing.observer import Observer, Takers
from millstream.services.process.request_id import REQUEST_ID, TRACE
from millstream.services.traceparent import usable_traceparent


class ObservedApp:
    """Passes each request to `app`, and to the observer when its reply has ended."""

    def __init__(self, app: Any, observer: Observer) -> None:
        self.app = app
        self._observer = observer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not self._observer.active:
            await self.app(scope, receive, send)
            return
        started = monotonic()
        sent = None
        for name, value in scope["headers"]:
            if name == b"traceparent":
                sent = usable_traceparent(value)
        trace = self._observer.trace(sent)
        TRACE.set(trace)
        tickets: list[Any] = []
        TICKETS.set(tickets)
        status, size = 0, 0

        async def observed(message: Any) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, observed)
        except Exception:
            status = status or 500
            raise
        finally:
            status = status or CANCELLED_STATUS
            method = scope.get(METHOD, scope["method"])
            ended = monotonic()
            failed, reads = status in FAILED_HTTP, method in {"GET", "HEAD"}
            takers = self._observer.takers(trace, started, ended, failed=failed, invalid=status >= 400, reads=reads)
            if takers:
                client = scope.get("client")
                finished = Finished(
                    "http",
                    method,
                    getattr(scope.get("route"), "path_format", ""),
                    scope["path"][:PATH_MAX],
                    status,
                    started,
                    ended,
                    REQUEST_ID.get(),
                    trace,
                    client[0] if client else "",
                    size,
                    caller_name(),
                )
                self._observer.finish(takers, finished, tickets)


_Protocol = TypeVar("_Protocol", bound=type)


class _Observed:
    """Overrides of FastPathProtocol."""

    observer: ClassVar[Observer]
    # The methods below these overrides: `super()` in each call would take as long as the decision itself.
    _submit_unobserved: Callable[[Any, bytes], None]
    _answer_unobserved: Callable[[Any, HttpReply], int]
    _lost_unobserved: Callable[[Exception | None], None]

    def _submit(self, cycle: Any, body: bytes) -> None:
        cycle.submitted_at = monotonic()
        cycle.trace = self.observer.trace(cycle.headers.traceparent)
        self._submit_unobserved(cycle, body)

    def _answer(self, cycle: Any, reply: HttpReply) -> int:
        ticket = cycle.ticket
        status = self._answer_unobserved(cycle, reply)
        if status:
            ended = monotonic()
            started = cycle.submitted_at or ended
            trace = cycle.trace or cycle.headers.traceparent  # a refused request was not submitted
            takers = self.observer.takers(trace, started, ended, failed=status in FAILED_HTTP, invalid=status >= 400)
            if takers:
                self._observe(takers, cycle, ticket, status, len(reply.body), ended)
        return status

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self._active, self.cycle):  # type: ignore[attr-defined]
            if type(cycle) is RequestCycle and cycle.ticket is not None and not cycle.answered:
                ended = monotonic()
                takers = self.observer.takers(cycle.trace, cycle.submitted_at or ended, ended, failed=False)
                if takers:
                    self._observe(takers, cycle, cycle.ticket, CANCELLED_STATUS, 0, ended)
                break  # the request that was read last may be the active one
        self._lost_unobserved(exc)

    def _observe(self, takers: Takers, cycle: Any, ticket: Any, status: int, reply_bytes: int, ended: float) -> None:
        model, version = cycle.path
        if model:
            route = INFER_ROUTE if version is None else INFER_VERSION_ROUTE
            path = f"/v2/models/{model}{'' if version is None else f'/versions/{version}'}/infer"[:PATH_MAX]
        else:
            route = path = ""  # its head was refused
        client = self.client  # type: ignore[attr-defined]
        finished = Finished(
            "http",
            "POST",
            route,
            path,
            status,
            cycle.submitted_at or ended,
            ended,
            (cycle.request_id or b"").decode("ascii"),
            cycle.trace or cycle.headers.traceparent,
            client[0] if client else "",
            reply_bytes,
        )
        self.observer.finish(takers, finished, () if ticket is None else (ticket,))


_OVERRIDES = {name: vars(_Observed)[name] for name in ("_submit", "_answer", "connection_lost")}


def with_observer(protocol: _Protocol, observer: Observer) -> _Protocol:
    """Return the protocol class of a server, whose calls are observed while the observer has sinks."""
    plain: Any = protocol
    made: _Protocol = type(
        protocol.__name__,
        (protocol,),
        {
            "observer": observer,
            "_observe": vars(_Observed)["_observe"],
            "_submit_unobserved": plain._submit,
            "_answer_unobserved": plain._answer,
            "_lost_unobserved": plain.connection_lost,
        },
    )  # type: ignore[assignment]

    def switch(active: bool) -> None:
        for name, override in _OVERRIDES.items():
            if active:
                setattr(made, name, override)
            elif name in vars(made):
                delattr(made, name)

    observer.on_switch(switch)
    return made
