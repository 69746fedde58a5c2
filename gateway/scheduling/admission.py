"""Admits requests, or refuses them: 429 for a lane, 503 for a whole gateway; and gives each its one answer.

request ─> LaneAdmission (waiting rows of one lane, time until the answer) ─> Admission (requests and bytes in flight)

The permit travels with the request as `permit_bytes` and is released exactly once, when the request is done.

outputs of a batch ─> answer ─┐
Failure ───────────────> fail ─┼─> finish (its permit is released) ─> counted ─> responder
caller went away ────> cancel ─┘                                         (a cancelled request has no reply)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from millstream.gateway.scheduling.batching.batcher import Batcher
from millstream.gateway.scheduling.batching.dispatch import DispatchPolicy
from millstream.gateway.scheduling.circuit import Circuit
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.lane_state import LaneState
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.gateway.scheduling.request import Part, Request
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Code, Failure
from millstream.services.metrics.inference import Reason
from millstream.services.metrics.registry import Counter, Gauge
from millstream.services.wire.batch import ReplyHeader

CANNOT_SERVE_RETRY_S = 10.0  # hint to clients of a version that no worker tries again: operators take longer to mend it
RETRY_S_MIN = 1.0  # hint to clients of a version that a worker tries again now


class Admission:
    """Counts the requests and bytes in flight of one gateway. Refuses with UNAVAILABLE (503) when it is full.

    Args:
        requests_max: limit on the requests in flight.
        bytes_max: limit on the bytes of their messages.
        in_flight: shows the number of requests in flight.
        refused: counts refused requests.
    """

    __slots__ = ("_bytes_max", "_gauge", "_refused", "_requests_max", "bytes", "closed", "requests")

    def __init__(self, requests_max: int, bytes_max: int, in_flight: Gauge, refused: Counter) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._gauge = in_flight
        self._refused = refused
        self.requests = 0
        self.bytes = 0
        self.closed = False  # True while draining: requests in flight are answered, new ones refused

    def admit(self, request: Request, size_bytes: int) -> None:
        """Give a request its permit, or raise Failure(UNAVAILABLE) with a time after which to retry."""
        if self.requests >= self._requests_max or self.bytes + size_bytes > self._bytes_max or self.closed:
            if self.closed:
                self._refused.add()
                raise Failure(Code.UNAVAILABLE, "the gateway is shutting down: try another one", retry_after_s=1)
            raise self._full()
        self.requests += 1
        self.bytes += size_bytes
        request.permit_bytes = size_bytes
        self._gauge.set(self.requests)

    def extend(self, request: Request, size_bytes: int) -> None:
        """Add bytes to the permit of a request, or raise Failure(UNAVAILABLE); a request alone may have any number."""
        if self.bytes + size_bytes > self._bytes_max and self.requests > 1:
            raise self._full()
        self.bytes += size_bytes
        request.permit_bytes += size_bytes

    def _full(self) -> Failure:
        self._refused.add()
        return Failure(
            Code.UNAVAILABLE,
            f"the gateway is full: {self.requests} requests of {self.bytes} bytes are in flight; try again later",
            retry_after_s=1,
        )

    def release(self, requests: Sequence[Request]) -> None:
        """Release the permits of requests."""
        self.requests -= len(requests)
        self.bytes -= sum([request.permit_bytes for request in requests])
        self._gauge.set(self.requests)


class LaneRefusal(Failure):
    """OVERLOADED: a lane refuses a request. `counter` counts it if no lane of another pool takes the request."""

    def __init__(self, message: str, retry_after_s: float, counter: Counter) -> None:
        super().__init__(Code.OVERLOADED, message, retry_after_s=retry_after_s)
        self.counter = counter


class LaneAdmission:
    """Refuses with OVERLOADED (429) when a lane is full, or would answer a request after its deadline.

    Args:
        state: of the lane.
        rows_waiting_max: limit on the waiting rows of the lane, unless one request has more.
        policy: the lane's batch sizes and estimates.
        batcher: the lane's waiting requests.
        circuit: refuses the version while it is open.
        quarantine: refuses requests that killed workers, or whose runs were endless.
        metrics: has the counters of refusals.
    """

    __slots__ = ("_batcher", "_circuit", "_metrics", "_policy", "_quarantine", "_rows_waiting_max", "_state")

    def __init__(
        self,
        state: LaneState,
        rows_waiting_max: int,
        policy: DispatchPolicy,
        batcher: Batcher,
        circuit: Circuit,
        quarantine: Quarantine,
        metrics: LaneMetrics,
    ) -> None:
        self._state = state
        self._circuit = circuit
        self._quarantine = quarantine
        self._rows_waiting_max = rows_waiting_max
        self._policy = policy
        self._batcher = batcher
        self._metrics = metrics

    def check(self, request: Request) -> None:
        """Raise LaneRefusal, with a time after which to retry, if the lane cannot take a request."""
        rows_waiting = self._batcher.rows
        if rows_waiting and rows_waiting + request.rows > self._rows_waiting_max:
            raise self._full(rows_waiting)
        # A cheap upper bound: the request waits behind all others for a full batch. If that is late, estimate exactly.
        policy = self._policy
        estimator = policy.estimator
        behind_s = rows_waiting // policy.batch_rows * estimator.step_s + estimator.full_s + estimator.margin_s
        # An idle lane refuses none: its answers correct the estimate.
        if max(estimator.free_at, request.arrival) + behind_s > request.deadline and (
            rows_waiting or self._state.in_flight
        ):
            self._check_time(request)

    def check_split(self, request: Request, rows_ahead: int) -> None:
        """Raise LaneRefusal, as `check` does, for a request of which one part after another enters the lane.

        `rows_ahead`: rows outside of the lane, its own included, that run before its last part.
        """
        rows_waiting = self._batcher.rows
        if rows_waiting and rows_waiting + self._policy.batch_rows > self._rows_waiting_max:
            raise self._full(rows_waiting)
        if rows_waiting or self._state.in_flight:
            self._check_time(request, rows_ahead)

    def check_served(self, request: Request) -> None:
        """Raise Failure: UNAVAILABLE (no instance can serve, or the circuit is open), MODEL (in quarantine)."""
        if self._state.failed is not None:
            raise self.cannot_serve()
        if self._circuit.open_until:
            self._circuit.check()
        if not self._quarantine.empty:
            self._quarantine.check(self._state.content_id, request)

    def cannot_serve(self) -> Failure:
        """Return the refusal of a version that no instance can serve. A worker says when it tries again, or none."""
        state = self._state
        left_s = state.retry_at - state.link.clock.now_ms() / 1000
        return Failure(
            Code.UNAVAILABLE,
            f"model '{state.manifest.model}' cannot serve: {state.failed}",
            retry_after_s=max(RETRY_S_MIN, left_s) if state.retry_at else CANNOT_SERVE_RETRY_S,
        )

    def _full(self, rows_waiting: int) -> LaneRefusal:
        return LaneRefusal(
            f"the queue of model '{self._state.manifest.model}' is full: {rows_waiting} rows wait; try again later",
            max(rows_waiting / self._policy.batch_rows * self._policy.estimator.step_s, 0.1),
            self._metrics.refused_full,
        )

    def _check_time(self, request: Request, rows_outside: int = 0) -> None:
        """Raise LaneRefusal if the request would be answered after its deadline, behind `rows_outside` more rows."""
        rows_ahead = self._batcher.rows_ahead(request.priority, request.deadline) + rows_outside
        late_s = self._policy.estimator.answer_at(rows_ahead, request) - request.deadline
        if late_s <= 0:
            return
        behind_s = request.deadline + late_s - request.arrival
        model = self._state.manifest.model
        raise LaneRefusal(
            f"model '{model}' would answer in about {behind_s:.3f} s, later than the request may wait",
            late_s,
            self._metrics.refused_late,
        )


log = logging.getLogger("millstream.lane")


class Answers:
    """Answers the requests of one lane, releases their permits, and counts them.

    Parts of requests are only handed to their request, which is answered when it has all of them.
    """

    __slots__ = ("_admission", "_clock", "_metrics", "_state")

    def __init__(
        self, state: LaneState, admission: Admission, metrics: LaneMetrics, clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._admission = admission
        self._metrics = metrics
        self._clock = clock

    def answer(self, live: list[Request], outputs: Outputs, header: ReplyHeader, put_at: float, now: float) -> None:
        """Answer the requests of a batch that are not done yet.

        If none is done and all have the same responder, one call of the responder answers all.

        Args:
            live: the requests that did not fail, in the order of `outputs`.
            outputs: the outputs of these requests.
            header: the header of the batch's reply.
            put_at: when the batch was put.
            now: when the reply came.
        """
        waiting = [request for request in live if not request.done]
        if not waiting:
            return
        responder = waiting[0].responder
        others = [request for request in waiting if request.responder is not responder]
        admitted = waiting
        if others or waiting[0].part:  # the parts of a request have a responder of their own
            admitted = [request for request in waiting if not request.part]
            self._take_parts([request for request in waiting if request.part], (header, put_at, now))
        self._finish(admitted)
        if admitted and admitted[0].counted:  # a readiness probe is alone in its batch
            # Counted before they are answered, so that a caller with its answer finds it in the metrics.
            for group in _by_protocol(admitted) if others else (admitted,):
                rows = sum([request.rows for request in group])
                self._state.rows_done += rows
                self._metrics.answered(
                    group[0].responder.protocol,
                    [now - request.arrival for request in group],
                    rows,
                    header,
                    now - put_at,
                )
        try:
            if others or len(waiting) < len(live):
                _answer_each(live, set(map(id, waiting)), outputs)
            else:
                responder.answer(waiting, outputs)
        except Exception:
            log.exception("answers could not be delivered")

    def _take_parts(self, parts: list[Request], ran: tuple[ReplyHeader, float, float]) -> None:
        for part in parts:
            part.done = True
            self._state.rows_done += part.rows
            cast("Part", part).ran = ran

    def answer_split(self, request: Request, reply: Reply, header: ReplyHeader, since_run_s: float, now: float) -> None:
        """Answer a request that ran in parts.

        Args:
            request: has no answer yet.
            reply: the outputs of all parts.
            header: a header with the times of all parts, which did not wait in the queue.
            since_run_s: seconds since the runs of the parts began, of all parts together.
            now: when the reply to the last part came.
        """
        self._finish((request,))
        seconds = [now - request.arrival]
        self._metrics.answered(request.responder.protocol, seconds, request.rows, header, since_run_s)
        request.responder.answer_one(request, reply)

    def fail(self, requests: Sequence[Request], failure: Failure, reason: Reason | None = None) -> None:
        """Answer the requests that are not done yet with `failure`. `reason` None: it follows from the code."""
        for request in requests:
            if request.done:
                continue
            if request.part:
                self._fail_part(cast("Part", request), failure, reason)
                continue
            self._finish((request,))
            request.inputs = ()  # frees the tensors: it will not run
            if request.counted:
                self._state.rows_done += request.rows
                self._metrics.failed(request.responder.protocol, failure.code, self._clock() - request.arrival, reason)
            try:
                request.responder.fail(request, failure)
            except Exception:
                log.exception("a failure could not be delivered")

    def _fail_part(self, part: Part, failure: Failure, reason: Reason | None) -> None:
        part.done = True
        part.inputs = ()
        part.split.fail(part, failure, reason)

    def cancel(self, request: Request) -> None:
        """Finish a request whose caller went away: it gets no reply."""
        self._finish((request,))
        self._state.rows_done += request.rows
        self._metrics.failed(request.responder.protocol, Code.CANCELLED, self._clock() - request.arrival)

    def _finish(self, requests: Sequence[Request]) -> None:
        """Mark admitted requests as done, so that none is answered twice. Only this method marks them."""
        for request in requests:
            request.done = True
        self._admission.release(requests)


def _by_protocol(requests: list[Request]) -> Iterable[list[Request]]:
    """Return the requests in groups of one protocol each."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.responder.protocol, []).append(request)
    return groups.values()


def _answer_each(live: list[Request], waiting: set[int], outputs: Outputs) -> None:
    replies = outputs.replies([request.rows for request in live])
    for request, reply in zip(live, replies, strict=True):
        if id(request) in waiting:
            try:
                request.responder.answer_one(request, reply)
            except Exception:
                log.exception("an answer could not be delivered")
