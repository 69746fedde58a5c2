"""Lets web pages of other origins read replies. Off unless origins are set.

each reply ─> Cors.headers(Origin)        preflight (OPTIONS) ─> Cors.app, before any route sees it

Source: WHATWG Fetch, "HTTP CORS protocol". Pages may send credentials only if their origin is named: never with `*`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from millstream.gateway.connection.error_reply import JSON, error_body
from millstream.services.allowed_hosts import ANY

Headers = list[tuple[bytes, bytes]]

_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
#: headers of replies that pages may read, beside those that they always may
_EXPOSED = (
    b"x-request-id, server-timing, millstream-form, retry-after, endpoint-load-metrics, "
    b"inference-header-content-length, "
    b"content-encoding, www-authenticate"
)
_MAX_AGE_S = b"600"  # for which a browser may keep the answer to a preflight
_VARY = (b"vary", b"Origin")
#: header names in a preflight; others are not allowed, nor is a list that is longer
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")


class Cors:
    """Decides which origins may read replies, and answers preflights.

    Args:
        origins: As `parse_origins` returns them, at least one.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, origin: bytes | None) -> Headers:
        """Return the headers of a reply to a page of `origin`: the request's header; None: it was not sent."""
        exposed = (b"access-control-expose-headers", _EXPOSED)
        if self._any:
            return [(b"access-control-allow-origin", b"*"), exposed]
        if origin is None or origin.lower() not in self._origins:
            return [_VARY]
        allowed = (b"access-control-allow-origin", origin)
        return [_VARY, allowed, (b"access-control-allow-credentials", b"true"), exposed]

    def lines(self, origin: bytes | None) -> bytes:
        """Return the same headers as lines of a reply's head."""
        return b"".join([b"%b: %b\r\n" % header for header in self.headers(origin)])

    def app(self, scope: Any, app: Callable[..., Any]) -> Callable[..., Any]:
        """Return the ASGI application that answers a request: for a preflight its answer, else `app`."""
        if scope["method"] != "OPTIONS":
            return app
        headers = dict(scope["headers"])
        if b"origin" not in headers or b"access-control-request-method" not in headers:
            return app
        return self._preflight

    async def _preflight(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        if not self._any and headers[b"origin"].lower() not in self._origins:
            body = error_body("pages of this origin may not call: add it to MILLSTREAM_CORS_ORIGINS")
            await _reply(send, 403, [(b"content-type", JSON)], body)
            return
        asked = headers.get(b"access-control-request-headers", b"")
        allowed = [
            (b"vary", b"Access-Control-Request-Headers"),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        if _NAMES.fullmatch(asked):
            allowed.append((b"access-control-allow-headers", asked))
        await _reply(send, 204, allowed, b"")


async def _reply(send: Any, status: int, headers: Headers, body: bytes) -> None:
    length = [] if status == 204 else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*length, *headers]})
    await send({"type": "http.response.body", "body": body})
