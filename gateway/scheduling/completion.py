"""Completes a batch: its reply frees a credit for the next batch, then its requests are answered or recovered.

reply ─> credit free ─> next batch leaves ─> unpack ─> answers ─> failed requests: recovery ─> shared memory given back
"""

from __future__ import annotations

import logging

from millstream.gateway.observing.observer import guarded
from millstream.gateway.scheduling.admission import Answers
from millstream.gateway.scheduling.dispatcher import Dispatcher
from millstream.gateway.scheduling.in_flight import InFlight
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.lane_state import InFlightBatch
from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.pool_context import PoolContext
from millstream.gateway.scheduling.recovery import Recovery
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.outputs import Outputs
from millstream.services.errors import Code, Failure
from millstream.services.wire.batch import ReplyHeader

log = logging.getLogger("millstream.lane")


class Completion:
    """Completes the batches of one lane."""

    __slots__ = (
        "_answers",
        "_dispatcher",
        "_gate",
        "_in_flight",
        "_metrics",
        "_packer",
        "_recorders",
        "_recovery",
        "_timing",
    )

    def __init__(
        self,
        in_flight: InFlight,
        answers: Answers,
        recovery: Recovery,
        packer: Packer,
        metrics: LaneMetrics,
        context: PoolContext,
        dispatcher: Dispatcher,
    ) -> None:
        self._in_flight = in_flight
        self._answers = answers
        self._recovery = recovery
        self._packer = packer
        self._metrics = metrics
        self._recorders = context.recorders
        self._timing = context.timing
        self._gate = context.gate
        self._dispatcher = dispatcher

    def resolve(self, batch: InFlightBatch, header: ReplyHeader, inline: memoryview) -> None:
        """Complete a batch with its reply. `inline` has the tensors that came within the reply."""
        now = self._in_flight.replied(batch)
        self._dispatcher.dispatch()
        requests, failures = batch.requests, header.failures
        if requests[0].counted:
            self._in_flight.ran(header.infer_s, now)
        self._metrics.batch(header, len(requests) if requests[0].counted else 0)
        if self._gate.enforced:
            _charge(requests, header)
        live = [request for i, request in enumerate(requests) if i not in failures] if failures else requests
        if self._timing is not None or header.form:
            self._note(requests, batch.put_at, header, now)
        outputs = self._unpack(batch.name, header, inline, live) if live else None
        if outputs is not None:
            self._answers.answer(live, outputs, header, batch.put_at, now)
        for i, (code, message) in failures.items():
            self._recovery.recover_request(requests[i], batch, code, message)
        for recorder in self._recorders:
            if recorder.on:
                guarded(recorder.batch, batch, header, live, outputs, now)
        if batch.slices:
            self._in_flight.free_slices(batch, max(batch.attempt, header.attempt))

    def _note(self, requests: list[Request], put_at: float, header: ReplyHeader, now: float) -> None:
        """Note in requests what their replies say of the run: its times, and the compiled form that made it."""
        timing = None if self._timing is None else self._timing(header, put_at, now, len(requests))
        for request in requests:
            request.timing, request.form = timing, header.form

    def _unpack(self, name: str, header: ReplyHeader, inline: memoryview, live: list[Request]) -> Outputs | None:
        """Return the outputs of the requests. If the reply cannot be read, fail the requests and return None."""
        try:
            return self._packer.unpack(header, inline, live)
        except (ValueError, IndexError) as error:
            log.exception("the reply to batch %s cannot be read", name)
            self._answers.fail(live, Failure(Code.INTERNAL, f"the reply of the worker cannot be read: {error}"))
            return None


def _charge(requests: list[Request], header: ReplyHeader) -> None:
    """Charge the key of each request of a batch its share of the run, by rows."""
    row_s = header.infer_s / max(1, header.run_rows)
    for request in requests:
        if request.key is not None:
            request.key.run_s.add(row_s * request.rows)
        if request.account is not None:
            request.account.add_compute(row_s * request.rows)
