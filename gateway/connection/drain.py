"""drain: whether this gateway is draining, what its HTTP connections do about it, and how requests of routes start.

While a gateway drains, the reply to the last waiting request of a connection says `Connection: close`, so that the
client reconnects to another gateway. Without that header, a client whose next request crosses the close cannot tell
the close from a failure.
"""

from __future__ import annotations

from typing import Any, ClassVar

from millstream.gateway.connection.cors import Cors
from millstream.gateway.connection.exchange import EXCHANGE, Exchange
from millstream.gateway.connection.infer_handler import InferHeaders
from millstream.gateway.connection.uvicorn_hooks import HttpToolsProtocol
from millstream.services.process.request_id import new_request_id, request_context


class Drain:
    """`draining` is set once and stays set. Readiness and every connection read it."""

    __slots__ = ("draining",)

    def __init__(self) -> None:
        self.draining = False


class DrainingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose replies say `Connection: close` while the gateway drains."""

    drain: ClassVar[Drain]
    cors: ClassVar[Cors | None] = None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a request whose turn has come. Called by uvicorn."""
        if self.drain.draining and not self.pipeline:
            cycle.keep_alive = False
        headers = InferHeaders.read(cycle.scope["headers"])
        request_id = headers.request_id or new_request_id()
        # uvicorn sends these before the headers of the route's reply, also with its own 500.
        cycle.default_headers = [*cycle.default_headers, (b"x-request-id", request_id)]
        if self.cors is not None:
            cycle.default_headers += self.cors.headers(headers.origin)
            app = self.cors.app(cycle.scope, app)
        with request_context(request_id, headers.traceparent):  # the task of the request takes these variables with it
            token = EXCHANGE.set(Exchange(headers, request_id, cycle.default_headers))
            super()._start_asgi_task(cycle, app)
            EXCHANGE.reset(token)
