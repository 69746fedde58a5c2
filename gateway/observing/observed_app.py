"""observed_app: ASGI middleware that observes the requests of all routes. A gateway without observer has none."""

from __future__ import annotations

import time
from typing import Any

from millstream.gateway.connection.exchange import EXCHANGE, METHOD
from millstream.gateway.observing.finished import CANCELLED_STATUS, PATH_MAX, TICKETS, Finished
from millstream.gateway.observing.observer import Observer
from millstream.services.process.request_id import REQUEST_ID, TRACE_ID
from millstream.services.tracing.traceparent import trace_id_of, usable_traceparent


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
        traceparent = self._observer.traceparent(sent)
        TRACE_ID.set(trace_id_of(traceparent))
        exchange = EXCHANGE.get()
        if exchange is not None and traceparent is not sent:
            exchange.headers = exchange.headers._replace(traceparent=traceparent)
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
            client = scope.get("client")
            route = getattr(scope.get("route"), "path_format", "")
            self._observer.finish(
                Finished(
                    "http",
                    scope.get(METHOD, scope["method"]),
                    route,
                    scope["path"][:PATH_MAX],
                    status or CANCELLED_STATUS,
                    started,
                    time.monotonic(),
                    REQUEST_ID.get(),
                    traceparent,
                    client[0] if client else "",
                    size,
                ),
                tickets,
            )
