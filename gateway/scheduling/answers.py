"""Gives each request of a lane its one answer: outputs or a Failure.

outputs of a batch ─> answer ─┐
Failure ───────────────> fail ─┼─> finish (its permit is released) ─> counted ─> responder
caller went away ────> cancel ─┘                                         (a cancelled request has no reply)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from millstream.gateway.scheduling.admission import Admission
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.lane_state import LaneState
from millstream.gateway.scheduling.request import Part, Request
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Code, Failure
from millstream.services.metrics.inference import Reason
from millstream.services.wire.batch import ReplyHeader

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
