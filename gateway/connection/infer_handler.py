"""infer_handler: the interface between an HTTP adapter and the infer handler: bytes in, bytes out. Pure.

Two adapters use it: the ASGI route and the fast path in the HTTP protocol class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class InferHeaders(NamedTuple):
    """The request headers that change how an infer body is read and its reply written; None: not sent."""

    content_encoding: bytes | None
    accept_encoding: bytes | None
    header_length: bytes | None  # Inference-Header-Content-Length: bytes of JSON at the start of the decompressed body


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


class Cancel(Protocol):
    """The handle on a submitted request."""

    def cancel(self) -> None:
        """Drop a request that has not left the lane: its caller is gone. `done` is not called. Idempotent."""


class InferHandler(Protocol):
    """Answers infer requests. Errors of every kind are replies, too."""

    def submit(
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes,
        done: Callable[[HttpReply], None],
    ) -> Cancel:
        """Take a request, and return the handle that cancels it.

        Args:
            model: Path component, percent-decoded.
            version: Path component, percent-decoded; None: the path names no version.
            headers: Those that change how the body is read or the reply is written.
            body: As it was sent, perhaps compressed.
            done: Called once with the reply, in the event loop's thread, perhaps before this returns.
        """
