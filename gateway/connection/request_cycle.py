"""request_cycle: one infer request on a connection of the fast path, from its headers to its reply.

Stands beside uvicorn's own RequestResponseCycle and has what a protocol asks of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from millstream.gateway.connection.error_reply import too_large
from millstream.gateway.connection.infer_handler import Cancel, HttpReply, InferHeaders
from millstream.gateway.connection.path_cache import InferPath
from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.services.errors import Code, Failure

_NO_HEADERS = InferHeaders(None, None, None)


class _Unwaited(asyncio.Event):
    """An event for cycles that nobody waits for: one for all, since setting it does nothing."""

    def set(self) -> None:
        return


class RequestCycle:
    """An infer post. What is set by whom, and when, is FastPathProtocol's business.

    What a request seldom changes stands in the class: of the instances one is made for each request.
    """

    headers = _NO_HEADERS
    size_bytes = 0  # of `body`
    complete = False  # the whole body is here
    started = False  # its turn on the connection has come
    refusal: Failure | None = None
    ticket: Cancel | None = None
    keep_alive = True
    expect_continue = False
    answered = False  # its reply was given to the transport
    response_complete = False  # … which has room for the next one
    disconnected = False
    message_event = _Unwaited()  # uvicorn sets it when the connection is lost

    def __init__(self, path: InferPath, body: list[bytes], answer: Callable[[RequestCycle, HttpReply], None]) -> None:
        self.path = path
        self.body = body
        self._answer = answer

    def done(self, reply: HttpReply) -> None:
        """What the infer handler calls."""
        self._answer(self, reply)

    def read(self, headers: list[tuple[bytes, bytes]], body_bytes_max: int) -> None:
        """Take what the headers say; a length over the limit is a refusal before any of the body is read."""
        content_encoding = accept_encoding = header_length = None
        for name, value in headers:
            if name == b"content-length":
                if int(value) > body_bytes_max:
                    self.refusal = too_large(body_bytes_max)
            elif name == b"content-encoding":
                content_encoding = value.strip().lower()
            elif name == b"accept-encoding":
                accept_encoding = value
            elif name == b"inference-header-content-length":
                header_length = value
        if content_encoding is not None or accept_encoding is not None or header_length is not None:
            self.headers = InferHeaders(content_encoding, accept_encoding, header_length)

    def drop_body(self, receive_budget: ReceiveBudget) -> None:
        """It is received, or nobody will: it counts no more."""
        receive_budget.bytes -= self.size_bytes
        self.size_bytes = 0
        self.body = []


def refused(failure: Failure, answer: Callable[[RequestCycle, HttpReply], None]) -> RequestCycle:
    """Stands for what is no request: its reply is a refusal, after which the connection closes."""
    cycle = RequestCycle(("", None), [], answer)
    cycle.refusal = failure
    cycle.keep_alive = False
    return cycle


def _gone() -> RequestCycle:
    """The request after the last one of a connection: nothing comes of it."""
    cycle = refused(Failure(Code.CANCELLED, ""), lambda *_: None)
    cycle.response_complete = cycle.disconnected = True
    return cycle


CLOSED = _gone()


def is_whole(cycle: Any) -> bool:
    """Whether all of a request is here; also of one of uvicorn's own."""
    return cycle.complete if type(cycle) is RequestCycle else not cycle.more_body
