"""What a route asks about a body and its sender: how long it says it is, and whether anybody still waits."""

from __future__ import annotations

from fastapi import Request
from starlette.types import Receive

#: more digits than any limit has; converting a number of any length would cost the square of it
_DIGITS_MAX = 18


def declared_bytes(request: Request) -> int:
    """The Content-Length, or 0 for a body that comes in chunks."""
    declared = request.headers.get("content-length", "")
    return int(declared[:_DIGITS_MAX]) if declared.isdecimal() else 0


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
