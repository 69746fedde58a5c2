"""count_replies: ASGI middleware that counts the replies of the application by the template of their path."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.gateway.connection.exchange import METHOD
from millstream.gateway.connection.http_counts import HttpCounts


class CountReplies:
    """Counts a reply when its head is sent. `counts` are the gateway's counters."""

    def __init__(self, app: ASGIApp, counts: HttpCounts) -> None:
        self.app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The router sets the route while the request runs; a path without one leaves the key out.
                route = getattr(scope.get("route"), "path_format", None)
                self._counts.add(route, scope.get(METHOD, scope["method"]), message["status"])
            await send(message)

        await self.app(scope, receive, counted)
