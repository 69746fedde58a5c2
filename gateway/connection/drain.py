"""drain: whether this gateway is draining, and what its HTTP connections do about it.

While a gateway drains, the reply to the last waiting request of a connection says `Connection: close`, so that the
client reconnects to another gateway. Without that header, a client whose next request crosses the close cannot tell
the close from a failure.
"""

from __future__ import annotations

from typing import Any, ClassVar

from millstream.gateway.connection.request_head import head_fault
from millstream.gateway.connection.uvicorn_hooks import HttpToolsProtocol, check_parts


class Drain:
    """`draining` is set once and stays set. Readiness and every connection read it."""

    __slots__ = ("draining",)

    def __init__(self) -> None:
        self.draining = False


class DrainingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, whose replies say `Connection: close` while the gateway drains."""

    drain: ClassVar[Drain]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a request whose turn has come. Called by uvicorn."""
        if self.drain.draining and not self.pipeline:
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)


class _AsgiProtocol(DrainingProtocol):
    def on_headers_complete(self) -> None:
        fault = head_fault(self.parser.get_http_version(), self.headers)
        if fault is not None:
            raise ValueError(fault)  # uvicorn answers 400 and closes
        super().on_headers_complete()


def asgi_protocol(drain: Drain) -> type[DrainingProtocol]:
    """Return the protocol class of a server without the fast path. Raises Failure if uvicorn lacks a needed part."""
    check_parts()
    return type("AsgiProtocol", (_AsgiProtocol,), {"drain": drain})
