"""Requests of one connection take turns, and their replies go out in the order of the requests.

request read ─> `_start`, or `pipeline` until its turn ─> InferHandler.submit ……… `_answer` ─> transport ─> next turn
A refusal is a reply, too: it takes its turn, and the connection closes after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from millstream.gateway.access.gate import Gate, Pass
from millstream.gateway.connection.bounded_protocol import BoundedProtocol
from millstream.gateway.connection.budgets import SMALL_BYTES_MAX, ReceiveBudget, ReplyBudget
from millstream.gateway.connection.error_reply import error_reply, internal_failure, too_large
from millstream.gateway.connection.http_counts import HttpCounts
from millstream.gateway.connection.infer_handler import (
    NO_HEADERS,
    Cancel,
    HttpReply,
    InferHandler,
    InferHeaders,
    head,
    ok_prefix,
)
from millstream.gateway.connection.request_head import InferPath
from millstream.services.errors import Code, Failure
from millstream.services.process.request_id import new_request_id, request_context
from millstream.services.traceparent import Trace

PIPELINE_MAX = 16  # requests of one connection that may wait for their turn; at the limit, reading is paused
#: Infer requests of one connection that are answered in one turn of the event loop. Those beyond wait, and other
#: connections get their turn: refusals need no wait, and a client may send thousands of wrong requests at once.
ANSWERS_PER_TURN_MAX = 64


class _IgnoredEvent(asyncio.Event):
    """An event that no task waits for. Setting it does nothing, so that all cycles can share one."""

    def set(self) -> None:
        return


class RequestCycle:
    """An infer post, from its headers to its reply. The connection sets its fields.

    A connection also has uvicorn's RequestResponseCycles, for other requests. The fields that uvicorn's protocol reads
    of a cycle have the same names here.

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

    `headers`: those of the request, as far as they were received.
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


def _is_answered(cycle: Any) -> bool:
    return bool(cycle.answered if type(cycle) is RequestCycle else cycle.response_complete)


class ReplyOrder(BoundedProtocol):
    """The replying half of a connection (states: fast_path).

    `fast_path_protocol` sets the class variables, which the connections of a server share.
    """

    infer: ClassVar[InferHandler]
    body_bytes_max: ClassVar[int]
    receive_budget: ClassVar[ReceiveBudget]
    reply_budget: ClassVar[ReplyBudget]
    http_counts: ClassVar[HttpCounts]
    gate: ClassVar[Gate]
    ok_prefix: ClassVar[list[Any]]  # [default headers, head of a 200 with them up to the length]

    cycle: Any  # the request read last: a RequestCycle, or uvicorn's own
    pipeline: deque[tuple[Any, Any]]  # (cycle, ASGI app) of the requests after `_active`, the next one at the right

    _active: Any = None  # the request whose turn it is
    _blocked: Any = None  # an answered request whose client has yet to read the reply
    _advancing = False  # `_advance` runs
    _answers = 0  # infer requests answered since the last rest
    _resting = False  # no further request starts in this turn of the event loop
    _unread_bytes = 0  # bytes of unread replies that `reply_budget` counts

    def _unset_keepalive_if_required(self) -> None:
        self._timer.unset()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start the next request. uvicorn calls this for its own cycles, `_advance` for both kinds."""
        if type(cycle) is RequestCycle:
            self._start(cycle)
        else:
            self._unset_keepalive_if_required()
            self._active = cycle
            super()._start_asgi_task(cycle, app)

    def _start(self, cycle: RequestCycle) -> None:
        self._timer.unset()  # an answer to an earlier request of the same segment may have set it
        cycle.started = True
        self._active = cycle
        if cycle.answered:  # a refusal in place of a request that has its reply
            self._close_after_reply(cycle)
            return
        if cycle.refusal is not None:
            self._answer(cycle, error_reply(cycle.refusal))
            return
        if cycle.expect_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if cycle.complete:
            self._submit_received(cycle)

    def _submit_received(self, cycle: RequestCycle) -> None:
        parts = cycle.body
        cycle.drop_body(self.receive_budget)
        self._submit(cycle, parts[0] if len(parts) == 1 else b"".join(parts))

    def _submit(self, cycle: RequestCycle, body: bytes | memoryview) -> None:
        model, version = cycle.path
        headers = cycle.headers
        request_id = cycle.request_id = headers.request_id or new_request_id()
        principal = None
        if self.gate.enforced:
            try:
                cycle.passed = self.gate.enter_infer(headers.credential, model)
            except Failure as refusal:
                self._answer(cycle, error_reply(refusal))
                return
            principal = cycle.passed.principal
        try:
            ticket = self.infer.submit(model, version, headers, body, cycle.done, request_id, principal, cycle.trace)
        except Exception as error:
            with request_context(request_id, cycle.trace or headers.traceparent):
                failure = internal_failure("an infer post", error)
            if not cycle.answered:
                self._answer(cycle, error_reply(failure))
        else:
            if not cycle.answered:
                cycle.ticket = ticket

    def _answer(self, cycle: RequestCycle, reply: HttpReply) -> int:
        """Write the reply to a request, and return its status; 0 if the client is gone."""
        transport = self.transport
        if cycle.passed is not None:
            cycle.leave()
        if cycle.disconnected or transport.is_closing():
            return 0
        self._count_answer()
        cycle.answered = True
        cycle.ticket = None  # an idle connection must not keep its last request alive
        if self.drain.draining and not self.pipeline and not (self._receiving and cycle.complete):
            cycle.keep_alive = False  # no other request waits
        if len(reply.body) > SMALL_BYTES_MAX and not self.reply_budget.has_room(len(reply.body)):
            reply = error_reply(self.reply_budget.refusal())
        if self.cors is not None:
            reply = reply._replace(added=self.cors.lines(cycle.headers.origin) + reply.added)
        status, headers, body, added = reply
        request_id = cycle.request_id or cycle.headers.request_id or new_request_id()
        if status == 200 and cycle.keep_alive:
            defaults, prefix = self.ok_prefix
            if defaults is not self.server_state.default_headers:  # uvicorn makes a new list for each second's Date
                prefix = ok_prefix(self.server_state.default_headers)
                self.ok_prefix[:] = (self.server_state.default_headers, prefix)
            counts, at = self.http_counts.infer_ok[cycle.path[1] is not None]
            counts[at] += 1.0
            transport.write(
                b"%b%b\r\n%bcontent-length: %d\r\n%b\r\n%b"
                % (prefix, request_id, added, len(body), headers.lines, body)
            )
        else:
            self.http_counts.add_infer(cycle.path, status)
            lines = head(reply, self.server_state.default_headers, request_id, keep_alive=cycle.keep_alive)
            transport.write(lines + body)
        if self.flow.write_paused:
            self._blocked = cycle
            self.flow.pause_reading()
        elif cycle.keep_alive:
            cycle.response_complete = True
            self.on_response_complete()
        else:
            self._finish(cycle)
        return status

    def _count_answer(self) -> None:
        self._answers += 1
        if self._answers >= ANSWERS_PER_TURN_MAX and not self._resting:
            self._resting = True
            self.loop.call_soon(self._end_rest)

    def _end_rest(self) -> None:
        self._resting = False
        self._answers = 0
        if self.pipeline and self._blocked is None:
            self._advance()

    def _finish(self, cycle: RequestCycle) -> None:
        cycle.response_complete = True
        if cycle.keep_alive:
            self.on_response_complete()
        else:
            self.server_state.total_requests += 1
            self._close_after_reply(cycle)

    def on_response_complete(self) -> None:
        """Count the request and begin the next turn. Called for both kinds of cycles."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self._next_turn()

    def _next_turn(self) -> None:
        if self.flow.write_paused:
            self._blocked = self._active
            self.flow.pause_reading()
        elif self._ending:
            self._ending = False
            self._close_after_reply(self._active)
        elif self.pipeline:
            self._advance()
        else:
            if self.flow.read_paused:
                self.flow.resume_reading()
            self._timer.set(self.timeout_keep_alive)

    def _advance(self) -> None:
        """Start waiting requests in a loop: a handler that answers within `submit` would recurse for each request."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while (
                self.pipeline
                and self._active.response_complete
                and not self._resting
                and not self.transport.is_closing()
            ):
                cycle, app = self.pipeline.pop()
                if len(self.pipeline) < PIPELINE_MAX:
                    self.flow.resume_reading()
                self._start_asgi_task(cycle, app)
        finally:
            self._advancing = False
        if self._receiving:
            self._arm_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._count_unread(0)
        blocked, self._blocked = self._blocked, None
        if blocked is None or self.transport.is_closing():
            return
        if type(blocked) is RequestCycle:
            self._finish(blocked)
        else:
            self._next_turn()

    def _count_unread(self, size_bytes: int) -> None:
        self.reply_budget.bytes += size_bytes - self._unread_bytes
        self._unread_bytes = size_bytes

    def _refuse(self, failure: Failure) -> None:
        """Stop reading from this client. It gets the replies that are due, then this refusal.

        A request that was answered before all of it came gets no second reply, which the client would take for the
        reply to its next request.
        """
        if self.cycle is CLOSED:
            return
        refusal = refusal_cycle(failure, self._answer, self._headers_received())
        broken, self.cycle = self.cycle, refusal
        self._receiving = False
        self._discard_input()
        if broken is not None and not is_complete(broken) and _is_answered(broken):
            refusal.answered = True
            if self._blocked is not None:
                self.pipeline.appendleft((refusal, None))
                return
        elif broken is not None and not broken.response_complete:
            if is_complete(broken):
                self.pipeline.appendleft((refusal, None))
                return
            if type(broken) is RequestCycle:
                broken.drop_body(self.receive_budget)
            if self.pipeline:
                self.pipeline[0] = (refusal, None)
                return
            broken.disconnected = True
            broken.message_event.set()
        self._start(refusal)

    def _headers_received(self) -> InferHeaders:
        """Return the headers of the request that is being received, as far as they have come."""
        if not self._receiving:
            return NO_HEADERS
        cycle = self.cycle
        if cycle is None or is_complete(cycle):
            return InferHeaders.read(self.headers)  # its head is not complete, or was refused
        return cycle.headers if type(cycle) is RequestCycle else InferHeaders.read(cycle.scope["headers"])

    def send_400_response(self, msg: str) -> None:
        """Refuse input that is not HTTP as any other bad request is refused: in JSON, and in its turn."""
        self._refuse(Failure(Code.INVALID, msg))

    def _close_after_reply(self, cycle: RequestCycle) -> None:
        """Close the connection after its last reply: lingering, if the client may still be sending.

        While the gateway drains, it may send its next request before it reads that this reply is the last one.
        """
        while self.pipeline:
            waiting, _ = self.pipeline.pop()
            if type(waiting) is RequestCycle:
                waiting.drop_body(self.receive_budget)
        self.cycle = CLOSED
        if not is_complete(cycle):
            self._linger(self.transport.abort)
        elif self.drain.draining:
            self._linger(self.transport.close)
        else:
            self.transport.close()
