"""The interface between an HTTP adapter and the infer handler: bytes in, bytes out. Pure.

Two adapters use it: the ASGI route and the fast path in the HTTP protocol class.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

from millstream.gateway.access.principal import Principal
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
