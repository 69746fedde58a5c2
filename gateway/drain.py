"""drain: whether this gateway is leaving, and what its connections do about it.

From then on each answer behind which no other request waits says `Connection: close`, so that clients go on at another
gateway by themselves. A client that is never told so cannot tell a close that crosses its request from a failure.
"""

from __future__ import annotations

from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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


def plain_lane(drain: Drain) -> type[DrainingProtocol]:
    """The protocol class of a server without the fast lane."""
    return type("PlainLane", (DrainingProtocol,), {"drain": drain})
