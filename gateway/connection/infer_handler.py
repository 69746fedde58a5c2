"""The interface between an HTTP adapter and the infer handler: bytes in, bytes out.

Two adapters use it: the ASGI route and the fast path in the HTTP protocol class.
connection (a request of a route starts) ─> EXCHANGE ─> routes and lanes add headers to the reply, before it starts
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from millstream.gateway.access.principal import Principal
from millstream.gateway.connection.uvicorn_hooks import STATUS_LINE
from millstream.services.process.request_id import usable_request_id
from millstream.services.traceparent import Trace, usable_traceparent

_LENGTH = re.compile(rb"[0-9]{1,9}")


class InferHeaders(NamedTuple):
    """The request headers that change how an infer body is read and its reply written; None: not sent."""

    content_encoding: bytes | None
    accept_encoding: bytes | None
    header_length: bytes | None  # Inference-Header-Content-Length: bytes of JSON at the start of the decompressed body
    request_id: bytes | None = None  # X-Request-Id, if usable
    origin: bytes | None = None  # Origin: the page that calls
    load_format: bytes | None = None  # endpoint-load-metrics-format: the form of the load report that the caller wants
    credential: bytes | None = None  # Authorization; without it, X-API-Key
    traceparent: bytes | None = None  # if usable: the caller's trace

    @property
    def binary_at(self) -> int | None:
        """Where the binary tensors of the body begin; None: it is compressed, it has none, or it is wrong."""
        length = self.header_length
        encoded = self.content_encoding is not None and self.content_encoding != b"identity"
        return None if encoded or length is None or not _LENGTH.fullmatch(length) else int(length)

    @classmethod
    def read(cls, headers: list[tuple[bytes, bytes]]) -> InferHeaders:
        """Return those of a request's `headers`, names in lower case. Of a repeated header the last counts."""
        sent = dict(headers)
        content_encoding, request_id = sent.get(b"content-encoding"), sent.get(b"x-request-id")
        traceparent, authorization = sent.get(b"traceparent"), sent.get(b"authorization")
        found = cls(
            None if content_encoding is None else content_encoding.strip().lower(),
            sent.get(b"accept-encoding"),
            sent.get(b"inference-header-content-length"),
            None if request_id is None else usable_request_id(request_id),
            sent.get(b"origin"),
            sent.get(b"endpoint-load-metrics-format"),
            sent.get(b"x-api-key") if authorization is None else authorization,
            None if traceparent is None else usable_traceparent(traceparent),
        )
        return NO_HEADERS if found == NO_HEADERS else found


#: of a request that sent none of them
NO_HEADERS = InferHeaders(None, None, None)


class ReplyHeaders(NamedTuple):
    """The headers of a reply without Content-Length, which the adapter adds."""

    pairs: tuple[tuple[bytes, bytes], ...]  # names in lower case
    lines: bytes  # the same headers as the bytes that are sent


def reply_headers(*pairs: tuple[bytes, bytes]) -> ReplyHeaders:
    """Return the headers in both forms. Call it once for headers that many replies share."""
    return ReplyHeaders(pairs, b"".join([b"%b: %b\r\n" % pair for pair in pairs]))


class HttpReply(NamedTuple):
    """A whole HTTP reply."""

    status: int
    headers: ReplyHeaders
    body: bytes
    added: bytes = b""  # further lines of the head, each with its line end; the server sends them before `headers`


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
    """Return the whole head of any reply, in the order of the ASGI route.

    These are the server's own headers, the request's id, those that the server adds to this reply, the length, and the
    reply's headers.
    """
    parts: list[bytes] = [STATUS_LINE[reply.status]]
    for name, value in defaults:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"x-request-id: %b\r\n%bcontent-length: %d\r\n" % (request_id, reply.added, len(reply.body)))
    parts.append(reply.headers.lines)
    parts.append(b"\r\n" if keep_alive else b"connection: close\r\n\r\n")
    return b"".join(parts)


class Cancel(Protocol):
    """The handle on a submitted request."""

    def cancel(self) -> None:
        """Drop a request that has not left the lane: its caller is gone. `done` is not called. Idempotent."""


class InferHandler(Protocol):
    """Answers infer requests. Errors of every kind are replies, too."""

    def submit(  # noqa: PLR0913 - an object for the arguments would cost each request its allocation
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes | memoryview,
        done: Callable[[HttpReply], None],
        request_id: bytes = b"",
        principal: Principal | None = None,
        trace: Trace | None = None,
    ) -> Cancel:
        """Take a request, and return the handle that cancels it.

        Args:
            model: Path component, percent-decoded.
            version: Path component, percent-decoded; None: the path names no version.
            headers: Those that change how the body is read or the reply is written.
            body: As it was sent, perhaps compressed. A large binary one is a view of shared memory, perhaps.
            done: Called once with the reply, in the event loop's thread, perhaps before this returns.
            request_id: The id that the reply will have, for logs and traces.
            principal: Who calls, and was let in; None: no key is needed.
            trace: The trace that the request belongs to, for logs; None: that of `headers`, if they have one.
        """


class Exchange:
    """One request of a route, for code that knows neither the route nor the connection.

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
