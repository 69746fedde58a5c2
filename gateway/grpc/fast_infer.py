"""Answers ModelInfer calls whose envelope is cached, without a task, coroutine or future.

head ─> key known? ─> message (a large one in shared memory) ─> envelope ─> limits of the key ─> lane
encode ─> FastCall.answer
Every other call goes to the handler of the method, which also refuses keys and learns them.
With an observer: submit: instant, trace ─> lane ……… end: status, bytes, the lane's times ─> Observer.finish
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import cast

import grpc

from millstream.gateway.access.gate import Gate, Pass
from millstream.gateway.access.principal import Principal
from millstream.gateway.connection.budgets import ReplyBudget, ReplyPermit
from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.connection.request_reader import RECEIVED_BYTES_MIN
from millstream.gateway.grpc.codec.encode import GrpcEncoder
from millstream.gateway.grpc.codec.envelopes import inputs_of
from millstream.gateway.grpc.codec.messages import refusal
from millstream.gateway.grpc.connections import message_framing
from millstream.gateway.grpc.connections.call_head import CallHead
from millstream.gateway.grpc.connections.fast_call import FastCall
from millstream.gateway.grpc.methods.infer import InferCalls
from millstream.gateway.http2.header_blocks import encode
from millstream.gateway.observing.finished import FAILED_GRPC, Finished
from millstream.gateway.observing.observer import Observer
from millstream.gateway.scheduling.request import FORM_HEADER, Request, bill, served_by
from millstream.gateway.tensors.outputs import Outputs, Reply, size_of
from millstream.services.errors import Failure
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.process.request_id import new_request_id, request_context
from millstream.services.segments.shared_buffers import SharedBuffers
from millstream.services.traceparent import Trace

_SERVICE, _METHOD = "inference.GRPCInferenceService", "ModelInfer"


class FastRequest(Request):
    """The request of a call."""

    call: FastCall
    trace: Trace | None
    encoder: GrpcEncoder
    outputs: tuple[int, ...] | None
    permit: ReplyPermit
    passed: Pass | None = None  # of a call whose key was checked, until it is answered
    answered = False

    @property
    def wanted(self) -> tuple[int, ...] | None:
        return self.outputs

    def over(self, call: FastCall) -> None:
        """Give the reply's bytes back, and drop the request if its caller is gone."""
        self.permit.release()
        if not self.answered:
            self.lane.cancel(self)
            self.leave()
            cast("FastInfer", self.responder).gave_up(call, self)

    def leave(self) -> None:
        """End the call for the limits of its key."""
        passed, self.passed = self.passed, None
        if passed is not None:
            passed.leave()


class FastInfer:
    """Submits calls of ModelInfer, and answers them as the responder of their requests.

    Args:
        infer: the handler of all other messages; its caches are used.
        gate: checks keys.
        reply_budget: the gateway's reply budget.
        timeout_s_max: the longest timeout.
        count: counts a call that ended with a status.
        buffers: shared memory for large messages; None: they are received elsewhere, and copied.
        observer: gets each call when it ends; None: calls are not observed.
    """

    protocol = RequestProtocol.GRPC

    def __init__(
        self,
        infer: InferCalls,
        gate: Gate,
        reply_budget: ReplyBudget,
        timeout_s_max: float,
        count: Callable[[grpc.StatusCode], None],
        buffers: SharedBuffers | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._infer = infer
        self._gate = gate
        self._reply_budget = reply_budget
        self._timeout_s_max = timeout_s_max
        self._count = count
        self._buffers = buffers
        self._observer = observer

    def memory(self, size_bytes: int, first: bytes) -> memoryview | None:
        """Return shared memory for an arriving message whose first bytes are `first`; None: other memory will do.

        A worker reads a tensor where it was received, if its message was the only one of a batch.
        """
        if self._buffers is None or size_bytes < RECEIVED_BYTES_MIN:
            return None
        tensor = self._infer.largest_tensor(size_bytes, first)
        if tensor is None or tensor[1] < RECEIVED_BYTES_MIN:
            return None
        buffer = self._buffers.allocate(size_bytes, aligned_at=tensor[0])
        return None if buffer is None else buffer.bytes_view()

    def may_submit(self, head: CallHead) -> bool:
        """Whether `submit` may take a call with this head: no key is needed, or its key was verified before."""
        return not self._gate.enforced or self._gate.recognise(head.credential) is not None

    def submit(self, call: FastCall) -> bool:
        """Submit the call's message. Returns False if the handler has to take it: then nothing was done."""
        principal = None
        if self._gate.enforced:
            principal = self._gate.recognise(call.head.credential)
            if principal is None:  # it ended while the message came, or keys are needed only since then
                return False
        body = call.first_message()
        prepared = self._infer.prepared(body, principal)
        if prepared is None:
            return False
        route, envelope, encoder = prepared
        remaining_s = call.time_remaining()
        timeout_s = min(route.timeout_s, self._timeout_s_max)
        if remaining_s is not None:
            timeout_s = min(timeout_s, remaining_s)
        now = monotonic()
        request = FastRequest(inputs_of(body, envelope), envelope.rows, 0, now, now + timeout_s, self)
        request.request_id = new_request_id()
        request.call = call
        sent = call.head.traceparent
        request.trace = sent if self._observer is None or not self._observer.active else self._observer.trace(sent)
        request.encoder = encoder
        request.outputs = envelope.outputs
        request.permit = ReplyPermit(self._reply_budget)
        call.take_message()
        call.add_done_callback(request.over)
        if principal is not None and not self._charge(request, principal):
            return True
        try:
            route.lane.add(request, len(body), single=True)
        except Failure as failure:
            route.lane.record_rejection(self.protocol, failure.code)
            self.fail(request, failure)
        return True

    def _charge(self, request: FastRequest, principal: Principal) -> bool:
        """Let in a request that the scopes of its key allow; returns False if a limit refused it."""
        try:
            request.passed = self._gate.let_in(principal)
            bill(request, principal)
        except Failure as failure:
            self.fail(request, failure)
            return False
        return True

    def gave_up(self, call: FastCall, request: FastRequest | None = None) -> None:
        """Note that a call ended without an answer; the request is None if its message was not complete."""
        self._note_end(call, request, grpc.StatusCode.CANCELLED, 0)

    def _note_end(self, call: FastCall, request: FastRequest | None, status: grpc.StatusCode, reply_bytes: int) -> None:
        """Count a call that ended, and pass it to the observer, if there is one."""
        self._count(status)
        observer = self._observer
        if observer is None or not observer.active:
            return
        ended = monotonic()
        if request is None:
            trace, started, request_id = observer.trace(call.head.traceparent), ended - call.age_s, new_request_id()
        else:
            trace, started, request_id = request.trace, request.arrival, request.request_id
        number: int = status.value[0]
        takers = observer.takers(trace, started, ended, failed=number in FAILED_GRPC, invalid=number > 1)
        if takers:
            finished = Finished(
                "grpc",
                _METHOD,
                _SERVICE,
                f"/{_SERVICE}/{_METHOD}",
                number,
                started,
                ended,
                request_id.decode("ascii"),
                trace,
                call.address,
                reply_bytes,
            )
            observer.finish(takers, finished, () if request is None else (request,))

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        """Answer the requests of a batch."""
        for request, reply in zip(requests, outputs.replies([request.rows for request in requests]), strict=True):
            self.answer_one(request, reply)

    def answer_one(self, request: Request, reply: Reply) -> None:
        """Answer a request. Its reply is written at once, since the tensors are views valid only now."""
        mine = cast("FastRequest", request)
        if mine.call.over:
            return
        try:
            mine.permit.take(size_of(reply))
            body = mine.encoder.encode(mine.outputs, "", reply)
        except Failure as failure:
            self.fail(mine, failure)
        except Exception as error:
            with request_context(mine.request_id, mine.trace):
                self.fail(mine, internal_failure("a reply could not be written", error))
        else:
            mine.answered = True
            mine.leave()
            block = message_framing.ok_trailers(mine.request_id)
            if mine.form:
                block += encode([(FORM_HEADER, served_by(mine))])
            mine.call.answer(body, block)
            self._note_end(mine.call, mine, grpc.StatusCode.OK, len(body))

    def fail(self, request: Request, failure: Failure) -> None:
        """End a call with the status of `failure`."""
        mine = cast("FastRequest", request)
        mine.answered = True
        mine.leave()
        status, details, metadata = refusal(failure, mine.request_id.decode("ascii"))
        if not mine.call.over:
            mine.call.end(status, details, metadata)
            self._note_end(mine.call, mine, status, 0)


_SERVICE, _METHOD = "inference.GRPCInferenceService", "ModelInfer"
_PATH = f"/{_SERVICE}/{_METHOD}"
