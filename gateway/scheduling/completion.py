"""What becomes of a batch: its reply answers its requests, or they are recovered.

reply ─> credit free ─> next batch leaves ─> unpack ─> answers ─> failed requests: recovery ─> shared memory given back

batch lost on its way ──> put_again             a worker died with it ──> give_up: each request alone, then quarantine
Redis did not take it ──> refuse                a deadline passed ──────> expire
a reply's failure of one request ──> recover_request: run it again, or answer it with the failure
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from millstream.gateway.observing.finished import BatchTiming
from millstream.gateway.observing.observer import guarded
from millstream.gateway.scheduling.admission import Answers, Circuit
from millstream.gateway.scheduling.dispatcher import Dispatcher
from millstream.gateway.scheduling.in_flight import InFlight
from millstream.gateway.scheduling.lane_state import InFlightBatch, LaneState
from millstream.gateway.scheduling.quarantine import DIED, ENDED
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import ABSENT
from millstream.gateway.tensors.outputs import NO_OUTPUTS, Outputs
from millstream.services.errors import Code, Failure
from millstream.services.wire.batch import AGAIN, ENDLESS, NO_ROOM, ReplyHeader

log = logging.getLogger("millstream.lane")

LOST = "the connection to Redis broke each time this batch or its reply was sent"
SUSPECT = 2  # the attempt of a request that runs alone, because a worker died with its batch
LOSSES_MAX = 8  # losses of a batch or its reply; beyond that the batch itself may break the connection
#: A worker that reports an expiry this long before the deadline has a clock that differs from the gateway's.
DOUBT_S = 0.1
ABANDON_S = 10.0  # a batch without a reply is forgotten this long after its latest deadline, which frees its credit


@dataclass(slots=True, eq=False)
class Recovery:
    """Recovers the requests of one lane: those of batches without a reply, and those that a reply left unanswered."""

    _lane: LaneState
    _in_flight: InFlight
    _answers: Answers
    _circuit: Circuit
    _dispatcher: Dispatcher

    def put_again(self, batch: InFlightBatch, why: str = LOST, attempt: int = 0, *, untouched: bool = False) -> None:
        """Put the unanswered requests of a batch that was lost, or that no worker could read, as a new batch.

        While the version is refused, they are, too.

        Args:
            batch: the batch.
            why: the error message to its requests after LOSSES_MAX losses.
            attempt: the attempt of the new batch; 0: that of this one.
            untouched: as in `InFlight.forget`.
        """
        if not self._in_flight.connected:
            return  # it stays in flight: after a reconnect all batches in flight are put again
        self._in_flight.forget(batch, untouched=untouched)
        unanswered = self._unanswered(batch)
        if self._circuit.is_open():
            failure = self._circuit.failure()
        elif unanswered and batch.losses < LOSSES_MAX:
            self._in_flight.retry(unanswered, attempt or batch.attempt, batch.losses + 1)
            return
        else:
            failure = Failure(Code.UNAVAILABLE, why, retry_after_s=1)
        self._answers.fail(unanswered, failure)
        self._dispatcher.dispatch()

    def give_up(self, batch: InFlightBatch) -> None:
        """Recover from a worker's death: run each request alone. A request that kills a worker again is quarantined."""
        if not self._in_flight.connected:
            return
        unanswered = self._unanswered(batch)
        self._in_flight.forget(batch)
        if batch.attempt >= SUSPECT:
            for request in unanswered:
                self._lane.context.quarantine.add(self._lane.content_id, request, DIED)
            self._answers.fail(unanswered, Failure(Code.MODEL, "the worker died every time it ran this request"))
        elif self._circuit.is_open():
            self._answers.fail(unanswered, self._circuit.failure())
        else:
            for request in unanswered:
                self._in_flight.retry([request], SUSPECT)
        self._dispatcher.dispatch()

    def withdraw(self) -> list[tuple[list[Request], int]]:
        """Withdraw the batches in flight of a lane without workers: return their unanswered requests and attempts.

        A readiness probe among them fails.
        """
        withdrawn: list[tuple[list[Request], int]] = []
        for batch in self._in_flight.batches():
            self._in_flight.forget(batch)
            unanswered = self._unanswered(batch)
            for request in unanswered:
                request.wait_until = request.answer_by  # it has waited in the queue before
            if unanswered and unanswered[0].counted:
                withdrawn.append((unanswered, batch.attempt))
            else:
                self._answers.fail(unanswered, Failure(Code.UNAVAILABLE, LOST))
        return withdrawn

    def withdraw_put_since(self, instant: float) -> list[Request]:
        """Withdraw the batches that were put since an instant, and return their requests that have no answer.

        Those that a worker died with stay: they run alone.
        """
        withdrawn: list[Request] = []
        for batch in self._in_flight.batches():
            if batch.attempt < SUSPECT and batch.put_at >= instant and batch.requests[0].counted:
                self._in_flight.forget(batch)
                withdrawn += self._unanswered(batch)
        return withdrawn

    def _unanswered(self, batch: InFlightBatch) -> list[Request]:
        """Return the requests of a batch without an answer; fail one whose caller has a part of it."""
        unanswered = [request for request in batch.requests if not request.done]
        if unanswered and unanswered[0].begun:
            self.fail(unanswered[0], Failure(Code.UNAVAILABLE, unanswered[0].lost, retry_after_s=1))
            return []
        return unanswered

    def fail(self, request: Request, failure: Failure) -> None:
        """Fail a request whose answer cannot go on."""
        self._answers.fail((request,), failure)

    def refuse(self, batch: InFlightBatch, reason: str) -> None:
        """Fail a batch that Redis did not take."""
        failure = Failure(Code.UNAVAILABLE, f"the queue refused: {reason}", retry_after_s=1)
        self._answers.fail(batch.requests, failure)
        self._in_flight.forget(batch)
        self._dispatcher.dispatch()

    def expire(self, batch: InFlightBatch, now: float) -> None:
        """Answer requests of a batch whose deadline passed; forget the batch ABANDON_S after the last of them."""
        late = [request for request in batch.requests if request.deadline <= now and not request.done]
        if late:
            for request in late:
                self._in_flight.outlive(request, batch)
            if len(batch.requests) == 1:
                batch.inputs = late[0].inputs  # the quarantine needs them if the run turns out to be endless
            self._answers.fail(late, Failure(Code.EXPIRED, late[0].late))
        if now > batch.latest + ABANDON_S:
            self._in_flight.forget(batch)
            self._dispatcher.dispatch()

    def leave(self, batch: InFlightBatch, now: float) -> None:
        """Have the run of a batch ended if all its callers have gone. At their deadlines its worker ends it itself."""
        if batch.latest > now and not batch.requests[0].window and all(request.done for request in batch.requests):
            self._in_flight.leave(batch, now)

    def recover_request(self, request: Request, batch: InFlightBatch, code: str, message: str) -> None:
        """Run a request again, or fail it, depending on its `code` and `message` in the reply to its batch."""
        if request.begun:
            known = Code(code) if code in set(Code) else Code.UNAVAILABLE
            self.fail(request, Failure(known, message))
        elif code == AGAIN:
            self._run_alone(request, batch, message)
        elif code == Code.EXPIRED and request.deadline > self._lane.replied_at + DOUBT_S and self._in_flight.connected:
            self._run_without_deadline(request, batch)
        elif code == ENDLESS:
            self._fail_endless(request, batch, message)
        else:
            self._answers.fail((request,), _failure(request, Code(code), message))

    def _run_alone(self, request: Request, batch: InFlightBatch, message: str) -> None:
        """Run a request alone that did not fit into its batch's reply, or whose run left its worker to others."""
        if request.done:
            return
        if message != NO_ROOM:
            self._in_flight.yielded(self._lane.replied_at)
        if self._in_flight.connected and batch.losses < LOSSES_MAX:
            self._in_flight.retry([request], batch.attempt, batch.losses + 1)
        else:
            failure = Failure(Code.UNAVAILABLE, f"{message}, and it cannot run again: try again", retry_after_s=1)
            self._answers.fail((request,), failure)

    def _run_without_deadline(self, request: Request, batch: InFlightBatch) -> None:
        """Run a request again that a worker expired too early: a clock was set between two measurements.

        The gateway keeps the deadline. The worker gets none this time, so this happens once.
        """
        if request.done:
            return
        log.warning(
            "a worker took a deadline for passed that is %.3g s away: was the clock of Redis' machine set?",
            request.deadline - self._lane.replied_at,
        )
        self._in_flight.retry([request], batch.attempt, batch.losses, deadlines=False)

    def _fail_endless(self, request: Request, batch: InFlightBatch, message: str) -> None:
        """Fail a request whose run was ended because it took too long, and quarantine the request."""
        expired = request.done or request.deadline <= self._lane.replied_at
        if request.done:  # its deadline passed meanwhile
            request.inputs = batch.inputs
        self._lane.context.quarantine.add(self._lane.content_id, request, ENDED)
        self._lane.context.owner.blame(self._lane.pool, self._lane.content_id, batch.name)
        request.inputs = ()
        self._answers.fail((request,), Failure(Code.EXPIRED if expired else Code.MODEL, message))


@dataclass(slots=True, eq=False)
class Completion:
    """Completes the batches of one lane."""

    _lane: LaneState
    _in_flight: InFlight
    _answers: Answers
    _recovery: Recovery
    _dispatcher: Dispatcher

    def resolve(self, batch: InFlightBatch, header: ReplyHeader, inline: memoryview) -> None:
        """Complete a batch with its reply. `inline` has the tensors that came within the reply."""
        now = self._in_flight.replied(batch)
        self._dispatcher.dispatch()
        requests, failures = batch.requests, header.failures
        if requests[0].counted and not requests[0].window:
            self._in_flight.ran(header.infer_s, now)
        self._lane.metrics.batch(header, len(requests) if requests[0].counted else 0)
        if self._lane.context.gate.enforced:
            _charge(requests, header)
        live = [request for i, request in enumerate(requests) if i not in failures] if failures else requests
        if header.form or self._timing() is not None:
            self._note(requests, batch.put_at, header, now)
        outputs = None
        if live:
            in_parts = requests[0].window and not header.outputs  # its caller has them
            outputs = NO_OUTPUTS if in_parts else self._unpack(batch.name, header, inline, live)
        if outputs is not None:
            self._answers.answer(live, outputs, header, batch.put_at, now)
        for i, (code, message) in failures.items():
            self._recovery.recover_request(requests[i], batch, code, message)
        for recorder in self._lane.context.recorders:
            if recorder.on:
                guarded(recorder.batch, batch, header, live, outputs, now)
        if batch.slices:
            self._in_flight.free_slices(batch, max(batch.attempt, header.attempt))

    def _timing(self) -> Callable[[ReplyHeader, float, float, int], BatchTiming] | None:
        context, observer = self._lane.context, self._lane.context.observer
        return context.timing if observer is None or observer.active or observer.times_batches else None

    def _note(self, requests: list[Request], put_at: float, header: ReplyHeader, now: float) -> None:
        """Note in requests what their replies say of the run: its times, and the compiled form that made it."""
        make = self._timing()
        timing = None if make is None else make(header, put_at, now, len(requests))
        for request in requests:
            request.timing, request.form = timing, header.form

    def _unpack(self, name: str, header: ReplyHeader, inline: memoryview, live: list[Request]) -> Outputs | None:
        """Return the outputs of the requests. If the reply cannot be read, fail the requests and return None."""
        try:
            return self._lane.packer.unpack(header, inline, live)
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


def _failure(request: Request, code: Code, message: str) -> Failure:
    """Return the Failure that a worker reported for a request. A model's failure on an empty tensor becomes INVALID."""
    if code is Code.MODEL and any(not tensor.size_bytes and tensor.shape != ABSENT.shape for tensor in request.inputs):
        return Failure(Code.INVALID, f"the model takes no input without elements: {message}")
    return Failure(code, message)
