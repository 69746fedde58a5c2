"""drain: whether this gateway is leaving, and what its connections do about it.

From then on each answer behind which no other request waits says `Connection: close`, so that clients go on at another
gateway by themselves. A client that is never told so cannot tell a close that crosses its request from a failure.
"""

from __future__ import annotations

from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream.gateway.connection.request_head import head_fault


class Drain:
    """Begun once, and never over. Read by readiness and by every connection."""

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = False


class DrainingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose answers say goodbye while `drain` has begun."""

    drain: ClassVar[Drain]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Called by uvicorn when a request's turn has come."""
        if self.drain.begun and not self.pipeline:
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)


class _Plain(DrainingProtocol):
    def on_headers_complete(self) -> None:
        fault = head_fault(self.parser.get_http_version(), self.headers)
        if fault is not None:
            raise ValueError(fault)  # uvicorn answers 400 and closes
        super().on_headers_complete()


def asgi_protocol(drain: Drain) -> type[DrainingProtocol]:
    """The protocol class of a server without the fast path."""
    return type("PlainLane", (_Plain,), {"drain": drain})
