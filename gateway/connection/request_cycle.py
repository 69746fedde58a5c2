"""request_cycle: one infer request on a connection of the fast path, from its headers to its reply.

A connection also has uvicorn's RequestResponseCycles, for other requests. The fields that uvicorn's protocol reads of
a cycle have the same names here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from millstream.gateway.access.gate import Pass
from millstream.gateway.connection.error_reply import too_large
from millstream.gateway.connection.infer_handler import NO_HEADERS, Cancel, HttpReply, InferHeaders
from millstream.gateway.connection.path_cache import InferPath
from millstream.gateway.connection.receive_budget import ReceiveBudget
from millstream.services.errors import Code, Failure
from millstream.services.traceparent import Trace


class _IgnoredEvent(asyncio.Event):
    """An event that no task waits for. Setting it does nothing, so that all cycles can share one."""

    def set(self) -> None:
        return


class RequestCycle:
    """An infer post. The connection sets its fields (connection_state).

    An instance is made for each request, so fields that few requests change are defaults of the class.
    """

    headers = NO_HEADERS
    request_id = b""  # set when the request is submitted
    submitted_at = 0.0  # set where requests are observed, in seconds on the monotonic clock
    trace: Trace | None = None  # set where requests are observed
    size_bytes = 0  # of `body`
    caller = ""  # whose share of the receive budget a large body takes
    length_bytes = 0  # that the headers announce; 0: they announce none
    complete = False  # the whole body was received
    started = False  # its turn on the connection has come
    refusal: Failure | None = None
    ticket: Cancel | None = None
    keep_alive = True
    expect_continue = False
    answered = False  # its reply was written to the transport
    response_complete = False  # … and the transport has room for the next reply
    disconnected = False
    passed: Pass | None = None  # of a request whose key was checked, until it is answered
    message_event = _IgnoredEvent()  # uvicorn sets it when the connection is lost

    def __init__(
        self, path: InferPath, body: list[bytes | memoryview], answer: Callable[[RequestCycle, HttpReply], object]
    ) -> None:
        self.path = path
        self.body = body
        self._answer = answer

    def done(self, reply: HttpReply) -> None:
        """Answer the request. Called by the infer handler."""
        self._answer(self, reply)

    def read(self, headers: list[tuple[bytes, bytes]], body_bytes_max: int) -> None:
        """Set the fields that the headers decide. A length over the limit is refused before any of the body is read."""
        for name, value in headers:
            if name == b"content-length":
                self.length_bytes = int(value)
                if self.length_bytes > body_bytes_max:
                    self.refusal = too_large(body_bytes_max)
        self.headers = InferHeaders.read(headers)

    def leave(self) -> None:
        """End the call for the limits of its key."""
        passed, self.passed = self.passed, None
        if passed is not None:
            passed.leave()

    def drop_body(self, receive_budget: ReceiveBudget) -> None:
        """Drop the body, and give its bytes back to the receive budget."""
        receive_budget.charge(self.caller, self.size_bytes, 0)
        self.size_bytes = 0
        self.body = []


def refusal_cycle(
    failure: Failure, answer: Callable[[RequestCycle, HttpReply], object], headers: InferHeaders = NO_HEADERS
) -> RequestCycle:
    """Return a cycle that answers `failure` in place of a request. The connection closes after it.

    Args:
        failure: What is wrong with the request.
        answer: Writes the reply.
        headers: Of the request, as far as they were received.
    """
    cycle = RequestCycle(("", None), [], answer)
    cycle.headers = headers
    cycle.refusal = failure
    cycle.keep_alive = False
    return cycle


def _closed() -> RequestCycle:
    """Return the cycle of a connection that reads no more requests. It counts as answered."""
    cycle = refusal_cycle(Failure(Code.CANCELLED, ""), lambda *_: None)
    cycle.response_complete = cycle.disconnected = True
    return cycle


CLOSED = _closed()


def is_complete(cycle: Any) -> bool:
    """Whether the whole request was received. `cycle` is a RequestCycle, or uvicorn's own."""
    return cycle.complete if type(cycle) is RequestCycle else not cycle.more_body


def is_answered_early(cycle: Any) -> bool:
    """Whether the reply was written before the whole request was received. `cycle` may be None: there is no request."""
    if cycle is None or is_complete(cycle):
        return False
    return cycle.answered if type(cycle) is RequestCycle else cycle.response_complete
