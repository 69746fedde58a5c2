"""The status line and headers of a reply as bytes. Pure.

Their order is that of the ASGI route: the server's own headers, the request's id, those that the server adds to this
reply, the length, the reply's headers.
"""

from __future__ import annotations

from millstream.gateway.connection.infer_handler import HttpReply
from millstream.gateway.connection.uvicorn_hooks import STATUS_LINE

Headers = list[tuple[bytes, bytes]]


def ok_prefix(defaults: Headers) -> bytes:
    """Return the head of a 200 up to the value of X-Request-Id: the part that all of these replies share.

    The caller appends the id and its line end, the lines that are added, the length, the reply's own lines and the
    empty line.

    Args:
        defaults: The server's own headers.
    """
    lines = [b"%b: %b\r\n" % header for header in defaults]
    return b"".join((STATUS_LINE[200], *lines, b"x-request-id: "))


def head(reply: HttpReply, defaults: Headers, request_id: bytes, *, keep_alive: bool) -> bytes:
    """Return the whole head of any reply."""
    parts: list[bytes] = [STATUS_LINE[reply.status]]
    for name, value in defaults:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"x-request-id: %b\r\n%bcontent-length: %d\r\n" % (request_id, reply.added, len(reply.body)))
    parts.append(reply.headers.lines)
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)
