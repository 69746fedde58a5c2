"""What passes between an HTTP adapter and the infer handler: bytes in, bytes out. Pure.

Two adapters speak it: the ASGI route and the fast path in the HTTP protocol class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class InferHeaders(NamedTuple):
    """The request headers that change how an infer body is read and its reply written; None: not sent.

    `header_length` is `Inference-Header-Content-Length`: bytes of the JSON at the start of the decompressed body.
    """

    content_encoding: bytes | None
    accept_encoding: bytes | None
    header_length: bytes | None


class ReplyHeaders(NamedTuple):
    """Lower-case names, and no content-length: the adapter adds it. `lines`: the same as they go over the wire."""

    pairs: tuple[tuple[bytes, bytes], ...]
    lines: bytes


def reply_headers(*pairs: tuple[bytes, bytes]) -> ReplyHeaders:
    """Make them once and use them often."""
    return ReplyHeaders(pairs, b"".join([b"%b: %b\r\n" % pair for pair in pairs]))


class HttpReply(NamedTuple):
    """A finished reply."""

    status: int
    headers: ReplyHeaders
    body: bytes


class Cancel(Protocol):
    """The handle on a submitted request."""

    def cancel(self) -> None:
        """The caller went away: drop what has not left the lane; `done` is not called any more. Idempotent."""


class InferHandler(Protocol):
    """Answers infer requests; errors of every kind come back as replies."""

    def submit(
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes,
        done: Callable[[HttpReply], None],
    ) -> Cancel:
        """Take a request; `done` is called once, in the event loop's thread, maybe before this returns.

        `model` and `version` are the decoded path components as sent; `version` None: the path names none.
        """
