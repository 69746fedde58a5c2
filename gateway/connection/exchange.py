"""The request that a route answers, for code that knows neither the route nor the connection.

connection (a request starts) ─> EXCHANGE ─> routes and lanes add headers to the reply, before it starts
"""

from __future__ import annotations

from contextvars import ContextVar

from millstream.gateway.connection.infer_handler import InferHeaders


class Exchange:
    """One request of a route, and the headers that the server adds to its reply.

    Args:
        headers: Of the request.
        request_id: The id of the request.
        added: Headers that the server sends before the reply's own, names in lower case.
    """

    __slots__ = ("added", "headers", "request_id")

    def __init__(self, headers: InferHeaders, request_id: bytes, added: list[tuple[bytes, bytes]]) -> None:
        self.headers = headers
        self.request_id = request_id
        self.added = added

    def add(self, name: bytes, value: bytes) -> None:
        """Add a header to the reply, in place of an earlier one of this name."""
        self.added[:] = [*[header for header in self.added if header[0] != name], (name, value)]


METHOD = "millstream.method"  # key of a scope: the method that the client sent, where the scope has another

#: the exchange of the request that the current task answers; None outside of requests over HTTP
EXCHANGE: ContextVar[Exchange | None] = ContextVar("EXCHANGE", default=None)
