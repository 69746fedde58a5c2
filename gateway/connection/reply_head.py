"""reply_head: the bytes before a reply's body. Pure.

The order of headers is that of the ASGI route: the server's own, the length, the reply's.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from millstream.gateway.connection.infer_handler import HttpReply

Headers = list[tuple[bytes, bytes]]


def ok_prefix(defaults: Headers) -> bytes:
    """The head of a 200 up to its length, which is the same for all of them. `defaults`: the server's own headers.

    The length, the end of its line, the reply's own lines and an empty one follow.
    """
    lines = [b"%b: %b\r\n" % header for header in defaults]
    return b"".join((STATUS_LINE[200], *lines, b"content-length: "))


def head(reply: HttpReply, defaults: Headers, keep_alive: bool) -> bytes:
    """The whole head of any reply."""
    parts: list[bytes] = [STATUS_LINE[reply.status]]
    for name, value in defaults:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"content-length: %d\r\n" % len(reply.body))
    parts.append(reply.headers.lines)
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)
