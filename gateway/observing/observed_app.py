"""ASGI middleware that observes the requests of all routes. A gateway without observer has none."""

from __future__ import annotations

import time
from typing import Any

from millstream.gateway.access.principal import caller_name
from millstream.gateway.connection.exchange import METHOD
from millstream.gateway.observing.finished import CANCELLED_STATUS, FAILED_HTTP, PATH_MAX, TICKETS, Finished
from millstream.gateway.observing.observer import Observer
from millstream.services.process.request_id import REQUEST_ID, TRACE
from millstream.services.traceparent import usable_traceparent


class ObservedApp:
    """Passes each request to `app`, and to the observer when its reply has ended."""

    def __init__(self, app: Any, observer: Observer) -> None:
        self.app = app
        self._observer = observer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
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
            ended = time.monotonic()
            takers = self._observer.takers(
                trace, started, ended, failed=status in FAILED_HTTP, reads=method in {"GET", "HEAD"}
            )
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
