"""Admits requests to one lane, or refuses them, and gives each that was admitted its one answer.

request ─> Circuit (its version may serve) ─> LaneAdmission (waiting rows, time until the answer): refused with 429, 503

outputs of a batch ─> answer ─┐
Failure ───────────────> fail ─┼─> finish (its permit is released) ─> counted ─> responder
caller went away ────> cancel ─┘                                         (a cancelled request has no reply)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from millstream.gateway.scheduling.batching.batcher import Batcher
from millstream.gateway.scheduling.lane_state import LaneState
from millstream.gateway.scheduling.request import Part, Request
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Code, Failure
from millstream.services.metrics.inference import Reason
from millstream.services.metrics.registry import Counter
from millstream.services.wire.batch import ReplyHeader

log = logging.getLogger("millstream.lane")

CANNOT_SERVE_RETRY_S = 10.0  # hint to clients of a version that no worker tries again: operators take longer to mend it
RETRY_S_MIN = 1.0  # hint to clients of a version that a worker tries again now


@dataclass(slots=True, eq=False)
class Circuit:
    """One lane's side of the circuit breaker: closed, or open for some seconds, which refuses requests of the version.

    `open_until`: the instant at which an open circuit closes; 0 while it is closed.
    """

    _lane: LaneState
    open_until: float = 0.0

    def open(self, deaths: int, seconds: float) -> None:
        """Refuse the version for `seconds`. `deaths`: how much recent deaths and ended runs count together."""
        if not self.open_until:
            log.warning(
                "%s ended its worker, or had runs that had to be ended, too often recently (%d): refused for %.0f s",
                self._lane.manifest.content_id,
                deaths,
                seconds,
            )
        self.open_until = self._lane.clock() + seconds
        self._lane.metrics.refused.set(1)

    def check(self) -> None:
        """Raise Failure(UNAVAILABLE) while the circuit is open; close it when its time is over."""
        if self.is_open():
            raise self.failure()
        self.open_until = 0.0
        self._lane.metrics.refused.set(0)

    def is_open(self) -> bool:
        return self._lane.clock() < self.open_until

    def failure(self) -> Failure:
        """Return the Failure with which an open circuit refuses a request."""
        left_s = max(1.0, self.open_until - self._lane.clock())
        name = f"version {self._lane.manifest.version} of model '{self._lane.manifest.model}'"
        why = f"{name} ended its worker, or had runs that had to be ended, too often: it is refused for {left_s:.0f} s"
        return Failure(Code.UNAVAILABLE, why, retry_after_s=left_s)


class LaneRefusal(Failure):
    """OVERLOADED: a lane refuses a request. `counter` counts it if no lane of another pool takes the request."""

    def __init__(self, message: str, retry_after_s: float, counter: Counter) -> None:
        super().__init__(Code.OVERLOADED, message, retry_after_s=retry_after_s)
        self.counter = counter


@dataclass(slots=True, eq=False)
class LaneAdmission:
    """Refuses with OVERLOADED (429) when a lane is full, or would answer a request after its deadline."""

    _lane: LaneState
    _batcher: Batcher
    _circuit: Circuit

    def check(self, request: Request) -> None:
        """Raise LaneRefusal, with a time after which to retry, if the lane cannot take a request."""
        rows_waiting = self._batcher.rows
        if rows_waiting and rows_waiting + request.rows > self._lane.context.rows_waiting_max:
            raise self._full(rows_waiting)
        # A cheap upper bound: the request waits behind all others for a full batch. If that is late, estimate exactly.
        policy = self._lane.policy
        estimator = policy.estimator
        behind_s = rows_waiting // policy.batch_rows * estimator.step_s + estimator.full_s + estimator.margin_s
        # An idle lane refuses none: its answers correct the estimate.
        if max(estimator.free_at, request.arrival) + behind_s > request.deadline and (
            rows_waiting or self._lane.in_flight
        ):
            self._check_time(request)

    def check_split(self, request: Request, rows_ahead: int) -> None:
        """Raise LaneRefusal, as `check` does, for a request of which one part after another enters the lane.

        `rows_ahead`: rows outside of the lane, its own included, that run before its last part.
        """
        rows_waiting = self._batcher.rows
        if rows_waiting and rows_waiting + self._lane.policy.batch_rows > self._lane.context.rows_waiting_max:
            raise self._full(rows_waiting)
        if rows_waiting or self._lane.in_flight:
            self._check_time(request, rows_ahead)

    def check_served(self, request: Request) -> None:
        """Raise Failure: UNAVAILABLE (no instance can serve, or the circuit is open), MODEL (in quarantine)."""
        if self._lane.failed is not None:
            raise self.cannot_serve()
        if self._circuit.open_until:
            self._circuit.check()
        if not self._lane.context.quarantine.empty:
            self._lane.context.quarantine.check(self._lane.content_id, request)

    def cannot_serve(self) -> Failure:
        """Return the refusal of a version that no instance can serve. A worker says when it tries again, or none."""
        state = self._lane
        left_s = state.retry_at - state.link.clock.now_ms() / 1000
        return Failure(
            Code.UNAVAILABLE,
            f"model '{state.manifest.model}' cannot serve: {state.failed}",
            retry_after_s=max(RETRY_S_MIN, left_s) if state.retry_at else CANNOT_SERVE_RETRY_S,
        )

    def _full(self, rows_waiting: int) -> LaneRefusal:
        return LaneRefusal(
            f"the queue of model '{self._lane.manifest.model}' is full: {rows_waiting} rows wait; try again later",
            max(rows_waiting / self._lane.policy.batch_rows * self._lane.policy.estimator.step_s, 0.1),
            self._lane.metrics.refused_full,
        )

    def _check_time(self, request: Request, rows_outside: int = 0) -> None:
        """Raise LaneRefusal if the request would be answered after its deadline, behind `rows_outside` more rows."""
        rows_ahead = self._batcher.rows_ahead(request.priority, request.deadline) + rows_outside
        late_s = self._lane.policy.estimator.answer_at(rows_ahead, request) - request.deadline
        if late_s <= 0:
            return
        behind_s = request.deadline + late_s - request.arrival
        model = self._lane.manifest.model
        raise LaneRefusal(
            f"model '{model}' would answer in about {behind_s:.3f} s, later than the request may wait",
            late_s,
            self._lane.metrics.refused_late,
        )


@dataclass(slots=True, eq=False)
class Answers:
    """Answers the requests of one lane, releases their permits, and counts them.

    Parts of requests are only handed to their request, which is answered when it has all of them.
    """

    _lane: LaneState

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
                self._lane.rows_done += rows
                self._lane.metrics.answered(
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
            self._lane.rows_done += part.rows
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
        self._lane.metrics.answered(request.responder.protocol, seconds, request.rows, header, since_run_s)
        request.responder.answer_one(request, reply)

    def fail(self, requests: Sequence[Request], failure: Failure, reason: Reason | None = None) -> None:
        """Answer the requests that are not done yet with `failure`. `reason` None: it follows from the code."""
        for request in requests:
            if request.done:
                continue
            if request.part:
                request.done, request.inputs = True, ()
                cast("Part", request).split.fail(request, failure, reason)
                continue
            self._finish((request,))
            request.inputs = ()  # frees the tensors: it will not run
            if request.counted:
                self._lane.rows_done += request.rows
                self._lane.metrics.failed(
                    request.responder.protocol, failure.code, self._lane.clock() - request.arrival, reason
                )
            try:
                request.responder.fail(request, failure)
            except Exception:
                log.exception("a failure could not be delivered")

    def cancel(self, request: Request) -> None:
        """Finish a request whose caller went away: it gets no reply."""
        self._finish((request,))
        self._lane.rows_done += request.rows
        self._lane.metrics.failed(request.responder.protocol, Code.CANCELLED, self._lane.clock() - request.arrival)

    def _finish(self, requests: Sequence[Request]) -> None:
        """Mark admitted requests as done, so that none is answered twice. Only this method marks them."""
        for request in requests:
            request.done = True
        self._lane.context.admission.release(requests)


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
