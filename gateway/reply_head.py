"""reply_head: the bytes before a reply's body. Pure.

The order of headers is that of the ASGI route: the server's own, the length, the reply's.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.infer_types import HttpReply

Headers = list[tuple[bytes, bytes]]

#: what follows `ok_prefix` in a 200 with JSON: formatted with the length and the body
OK_JSON_TAIL = b"%d\r\ncontent-type: application/json\r\n\r\n%b"


def ok_prefix(defaults: Headers) -> bytes:
    """The head of a 200 up to its length, which is the same for all of them. `defaults`: the server's own headers."""
    lines = [b"%b: %b\r\n" % header for header in defaults]
    return b"".join((STATUS_LINE[200], *lines, b"content-length: "))


def head(reply: HttpReply, defaults: Headers, keep_alive: bool) -> bytes:
    """The whole head of any reply."""
    parts: list[bytes] = [STATUS_LINE[reply.status]]
    for name, value in defaults:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"content-length: %d\r\n" % len(reply.body))
    for name, value in reply.headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)
