"""reply_head: the status line and headers of a reply as bytes. Pure.

Their order is that of the ASGI route: the server's own headers, the length, the reply's headers.
"""

from __future__ import annotations

from millstream.gateway.connection.infer_handler import HttpReply
from millstream.gateway.connection.uvicorn_hooks import STATUS_LINE

Headers = list[tuple[bytes, bytes]]


def ok_prefix(defaults: Headers) -> bytes:
    """Return the head of a 200 up to the value of Content-Length: the part that all of these replies share.

    The caller appends the length and its line end, the reply's own lines and the empty line.

    Args:
        defaults: The server's own headers.
    """
    lines = [b"%b: %b\r\n" % header for header in defaults]
    return b"".join((STATUS_LINE[200], *lines, b"content-length: "))


def head(reply: HttpReply, defaults: Headers, keep_alive: bool) -> bytes:
    """Return the whole head of any reply."""
    parts: list[bytes] = [STATUS_LINE[reply.status]]
    for name, value in defaults:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"content-length: %d\r\n" % len(reply.body))
    parts.append(reply.headers.lines)
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)
