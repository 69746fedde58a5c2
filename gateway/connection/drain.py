"""Whether this gateway is draining, what its HTTP connections do about it, and how requests of routes start.

While a gateway drains, the reply to the last waiting request of a connection says `Connection: close`, so that the
client reconnects to another gateway. Without that header, a client whose next request crosses the close cannot tell
the close from a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from millstream.gateway.connection.cors import Cors
from millstream.gateway.connection.infer_handler import EXCHANGE, Exchange, InferHeaders
from millstream.gateway.connection.uvicorn_hooks import HttpToolsProtocol
from millstream.services.process.request_id import new_request_id, request_context

#: of a scope: a function that ends the connection at once, for replies without an end
ABORT = "millstream.abort"


class Drain:
    """`draining` is set once and stays set. Readiness and every connection read it."""

    __slots__ = ("_acts", "draining")

    def __init__(self) -> None:
        self.draining = False
        self._acts: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Drain from now on, and call what waits for that."""
        self.draining = True
        while self._acts:
            self._acts.pop()()

    def on_begin(self, act: Callable[[], None]) -> None:
        """Call `act` in the event loop when the drain begins."""
        self._acts.append(act)


class DrainingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose replies say `Connection: close` while the gateway drains."""

    drain: ClassVar[Drain]
    cors: ClassVar[Cors | None] = None

    _ending = False  # uvicorn's cycle wrote the last reply; `on_response_complete`, which follows, ends the connection

    def end_after(self, cycle: Any) -> None:
        """Close the connection of a cycle that writes no more.

        While the gateway drains, the client may send its next request before it reads that this reply is the last
        one. A socket that is closed with that request unread is reset, which can cut the reply.
        """
        if self.drain.draining and cycle.response_complete and not self.transport.is_closing():
            self._ending = True
        else:
            self.transport.close()

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
        cycle.transport = CycleTransport(self, cycle)
        cycle.scope[ABORT] = self.transport.abort
        with request_context(request_id, headers.traceparent):  # the task of the request takes these variables with it
            token = EXCHANGE.set(Exchange(headers, request_id, cycle.default_headers))
            super()._start_asgi_task(cycle, app)
            EXCHANGE.reset(token)


class CycleTransport:
    """What uvicorn's cycle uses of a transport. Closing it lets the connection decide how it ends."""

    __slots__ = ("_connection", "_cycle", "is_closing", "write")

    def __init__(self, connection: DrainingProtocol, cycle: Any) -> None:
        self._connection = connection
        self._cycle = cycle
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.end_after(self._cycle)
