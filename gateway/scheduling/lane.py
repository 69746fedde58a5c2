"""lane: one version's line in this gateway. Requests wait in its batcher; a batch leaves the moment a slot is free.

add ─> batcher ─(credit free)─> pack ─> put ……… reply ─> unpack ─> each request answered once ─> credit free
Credits are slots in the workers: ready instances x DEPTH. While all are taken, requests gather and batches fill.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextlib import suppress

from millstream.gateway.scheduling.batch_split import parts_within
from millstream.gateway.scheduling.batcher import RANK_MAX, Batcher
from millstream.gateway.scheduling.coalescing import Coalescer
from millstream.gateway.scheduling.estimator import LatencyEstimator
from millstream.gateway.scheduling.in_flight import InFlightBatch
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.pool_context import PoolContext
from millstream.gateway.scheduling.quarantine import DIED, ENDED
from millstream.gateway.scheduling.queue_policy import QueueRules
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import ABSENT
from millstream.gateway.tensors.outputs import Outputs, no_rows
from millstream.services.errors import Code, Failure
from millstream.services.metrics.inference import Reason
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.process.spin_wait import Spin
from millstream.services.wire.batch import AGAIN, ENDLESS, Place, ReplyHeader

log = logging.getLogger("millstream.lane")

DEPTH = 2  # batches per instance: one runs, one is there when it is done
SHORT_RUN_S = 0.001  # a run that is over before a batch behind it could have come
#: a run against which the way through the queue counts. A worker asks for more when it starts a run, with the reply that
#: frees a slot: what that slot brings is there only after the run and another way. One more batch fills the gap.
LONG_RUN_S = 0.02
COST_MS_MIN = 0.05  # of a batch, in its share of the workers: what there is beside the run
#: The longest run while other lanes of the pool are in use: they wait for it. Or so many times that of a single row, where
#: that is more: a run is not cut to pieces that take hardly less.
TURN_S = 0.01
TURN_RUNS = 1.5
LOST = "the connection to Redis broke each time this batch or its reply was sent"
SUSPECT = 2  # attempt of a batch that a worker died with: it is run alone
LOSSES_MAX = 8  # times that a batch, or its reply, is lost on its way: then it may be what breaks the connection
DOUBT_S = 0.1  # a worker that takes a deadline for passed so long before it has another clock than we
ABANDON_S = 10.0  # a batch all of whose deadlines passed this long ago gets no reply any more


class Lane:
    """All calls in the event loop."""

    def __init__(self, manifest: Manifest, shared: PoolContext, packer: Packer, tallies: LaneMetrics) -> None:
        self.manifest = manifest
        self.content_id = manifest.content_id
        self.link = shared.link
        config = manifest.config
        self.batcher = Batcher(rank_max=max(RANK_MAX, config.priority_levels))
        self._waiting = QueueRules(config) if QueueRules.needed(config) else None
        self._preferred = config.rows_preferred if manifest.signature.batching else ()
        self.failed: str | None = None  # why no instance can serve
        self.refused_until = 0.0  # by the clock, since the version keeps ending workers; 0: it is not refused
        self._deaths = 0  # of workers, of late
        self.replied = 0.0  # when the last reply came
        self._packer = packer
        self._ticking = shared.ticking
        self._pending = shared.pending
        self._admission = shared.admission
        self._tallies = tallies
        self._rows_waiting_max = shared.rows_waiting_max
        self._clock = shared.clock
        self._soon = shared.soon
        self._pressure = shared.pressure
        self._coalescer = Coalescer(
            shared.later, lambda: self._admission.requests, lambda: self._soon(self._dispatch_scheduled)
        )
        self._quarantine = shared.quarantine
        self._circuit_breaker = shared.circuit_breaker
        self._contention = shared.contention
        self._traces = shared.traces
        self._rest_s = shared.rest_s
        self._spin = Spin(shared.spin_s_max)
        self._looking = False
        self._look_until = 0.0
        self._scheduled = False
        self._credits = 0
        self._instances = 0
        self._outstanding = 0
        self._rows_ahead = 0  # that must wait before a batch leaves while each instance has one
        self._profile = Profile({})
        rows_max = manifest.config.rows_max if manifest.signature.batching else 1
        self._rows_max = min(rows_max, packer.rows_within(shared.reply_bytes_max))
        self._batch_bytes_max = shared.batch_bytes_max
        self._rows_efficient = self._rows_max
        self._batch_rows = self._rows_max  # that run together now
        self._beside = False  # whether other lanes of the pool are in use
        self._estimator = LatencyEstimator()
        self._delay_s = manifest.config.queue_delay_ms_max / 1000
        self._uniform = not any(spec.optional for spec in manifest.signature.inputs) and all(
            min(spec.shape[1 if manifest.signature.batching else 0 :], default=0) >= 0
            for spec in manifest.signature.inputs
        )
        self._quarantined_slices: list[tuple[float, list[Place]]] = []

    def place(
        self,
        instances: int,
        profile: Profile,
        rows: int,
        *,
        shared: bool,
        failed: str | None,
        batch_format: int | None = None,
        alone: bool = False,
    ) -> None:
        """What the workers say: ready instances, how long runs take, efficient rows, whether all share memory with us.

        `batch_format`: that they read; None: the newest of ours. `alone`: requests share no runs, since rows of this
        version were found to influence each other.
        """
        self._packer.batch_format = batch_format
        self._instances = instances
        self._packer.shared = shared
        self.failed = failed
        self._profile = profile
        self._rows_efficient = 1 if alone else min(self._rows_max, max((rows, *self._preferred)))
        self._tallies.batching_off(alone)
        self._size()
        self._tallies.instances.set(instances)
        self.dispatch()

    def _size(self) -> None:
        """How many rows run together, and what follows from it. A lane alone in its pool runs as many as are efficient."""
        profile = self._profile
        rows = self._rows_efficient
        if self._beside:
            within = profile.rows_within(max(TURN_S, TURN_RUNS * profile.predict(1)), rows)
            # A size that its workers want to try is predicted as if it gained nothing: that is what the try is for.
            rows = rows if within == profile.largest else within
        self._batch_rows = rows
        gap = SHORT_RUN_S <= profile.predict(rows) < LONG_RUN_S
        self._credits = self._instances * (DEPTH + 1 if gap else DEPTH)
        self._estimator.place(self._instances, profile, rows)

    @property
    def ready(self) -> bool:
        return self._instances > 0

    @property
    def run_s(self) -> float:
        """How long one row runs, as measured; 0 while that is not known."""
        return self._profile.predict(1)

    @property
    def idle(self) -> bool:
        return not self.batcher.count and not self._outstanding

    def add(self, request: Request, size_bytes: int, *, single: bool = False) -> None:
        """Admit a request and send it on, or let it wait for a slot. `single`: its protocol brings one at a time.

        Raises Failure: OVERLOADED (the lane is full, or it would be answered too late), UNAVAILABLE.
        """
        if not request.rows:
            self._answer_no_rows(request)
            return
        batcher, estimator = self.batcher, self._estimator
        if self._waiting is not None:
            self._waiting.prepare(request)
        waiting = batcher.rows
        if not waiting:
            self._ticking.add(self)
        elif waiting + request.rows > self._rows_waiting_max:
            self._refuse_full(waiting)
        # As if it had to wait for a full batch behind all that wait: this is not true of few, who are looked at closely.
        behind_s = waiting // self._batch_rows * estimator.step_s + estimator.full_s + estimator.margin_s
        if max(estimator.free_at, request.arrival) + behind_s > request.deadline:
            self._check_time(request)
        if self.failed is not None:
            raise self._cannot_serve()
        if self.refused_until:
            self._check_refused()
        if self._quarantine:
            self._quarantine.check(self.content_id, request)
        self._admission.admit(request, size_bytes)
        if self._waiting is not None:
            self._waiting.enter(request)
        batcher.add(request, None if self._uniform else self._shape(request))
        if not self._scheduled and self._outstanding < self._credits:
            # Not at once: whatever else arrived in the same turn of the event loop shall share the batch.
            self._scheduled = True
            if single and self._pressure.full(request.arrival):
                self._coalescer.begin()
            else:
                self._soon(self._dispatch_scheduled)
        elif self._coalescer.on:
            self._coalescer.joined()

    def _cannot_serve(self) -> Failure:
        return Failure(Code.UNAVAILABLE, f"model '{self.manifest.model}' cannot serve: {self.failed}")

    def _answer_no_rows(self, request: Request) -> None:
        """No run could say more than the signature does, and many models fail on nothing. Raises Failure(UNAVAILABLE)."""
        if self.failed is not None:
            raise self._cannot_serve()
        request.done = True
        self._tallies.answered_without_run(self._clock() - request.arrival)
        request.responder.answer_one(request, no_rows(self.manifest.signature))

    def _dispatch_scheduled(self) -> None:
        self._scheduled = False
        self.dispatch()

    def probe(self, request: Request) -> None:
        """Send a canary, in a batch of its own: it shares no run with requests that are counted.

        Not while anything waits, or no slot is free: then replies are on their way, and tell as much. Raises Failure.
        """
        if self.batcher.count or self._outstanding >= self._credits or not self.link.writable:
            return
        self._admission.admit(request, 0)
        request.counted, request.taken = False, True
        self._put([request], self._clock())

    def record_rejection(self, code: Code) -> None:
        """A request for this version was refused, or could not be read, before it was admitted."""
        self._tallies.record_rejection(code)

    def block(self, deaths: int, seconds: float) -> None:
        """Refuse the version for so long: it ended its worker so many times of late. What waits is refused, too."""
        if not self.refused_until:
            log.warning("%s ended its worker %d times of late: refused for %.0f s", self.content_id, deaths, seconds)
        self.refused_until, self._deaths = self._clock() + seconds, deaths
        self._tallies.refused.set(1)
        waiting = self.batcher.drain()
        if self._waiting is not None:
            self._waiting.leave(waiting)
        self._fail(waiting, self._deadly())
        self._ticking.add(self)

    def _check_refused(self) -> None:
        """Raises Failure(UNAVAILABLE) while the version is refused."""
        if self._clock() < self.refused_until:
            raise self._deadly()
        self.refused_until = 0.0
        self._tallies.refused.set(0)

    def _deadly(self) -> Failure:
        left_s = max(1.0, self.refused_until - self._clock())
        name = f"version {self.manifest.version} of model '{self.manifest.model}'"
        why = f"{name} ended its worker {self._deaths} times of late: it is refused for {left_s:.0f} s"
        return Failure(Code.UNAVAILABLE, why, retry_after_s=left_s)

    def _refuse_full(self, waiting: int) -> None:
        self._tallies.refused_full.add()
        raise Failure(
            Code.OVERLOADED,
            f"the queue of model '{self.manifest.model}' is full: {waiting} rows wait; try again later",
            retry_after_s=max(waiting / self._batch_rows * self._estimator.step_s, 0.1),
        )

    def _check_time(self, request: Request) -> None:
        """Refuse what could not be answered in time. An idle lane tries all the same: so it learns how long runs take."""
        if self.idle:
            return
        ahead = self.batcher.rows_ahead(request.priority, request.deadline)
        late_s = self._estimator.answer_at(ahead, request) - request.deadline
        if late_s <= 0:
            return
        self._tallies.refused_late.add()
        behind_s = request.deadline + late_s - request.arrival
        raise Failure(
            Code.OVERLOADED,
            f"model '{self.manifest.model}' would answer in about {behind_s:.3f} s, later than the request may wait",
            retry_after_s=late_s,
        )

    def _shape(self, request: Request) -> Hashable:
        if self.manifest.signature.batching:
            return tuple(tensor.shape[1:] for tensor in request.inputs)
        return tuple(tensor.shape for tensor in request.inputs)

    def dispatch(self) -> None:
        """Send batches while there are slots and requests."""
        if self._coalescer.on:
            return
        batcher = self.batcher
        while batcher.count and self._outstanding < self._credits and self.link.writable:
            now = self._clock()
            if self._contention.beside(self, now) is not self._beside:
                self._beside = not self._beside
                self._size()
            start = max(self._estimator.free_at, now)
            first = batcher.earliest()
            if self._waiting is None:
                left_s = first.deadline - start
                late = self._outstanding and left_s < self._least_s(first)
            else:
                left_s, late = first.answer_by - start, False
            if late or first.deadline <= now:
                self.expire(first.deadline)
                continue
            if self._outstanding >= self._instances and batcher.rows < self._rows_ahead:
                return
            if self._delay_s and self._delayed(now):
                return
            fits = self._estimator.full_s <= left_s
            rows = self._batch_rows if fits else self._estimator.rows_within(left_s)
            batch = batcher.take(now, self._sized(rows, now))
            if self._waiting is not None:
                self._waiting.leave(batch)
            self._put_parts(batch, now)

    def _put_parts(self, batch: list[Request], now: float) -> None:
        """Put a batch, in several where its requests bring too much to travel together."""
        if self._admission.bytes <= self._batch_bytes_max:  # of all requests in this gateway
            self._put(batch, now)
            return
        for part in parts_within(batch, self._batch_bytes_max):
            self._put(part, now)

    def _delayed(self, now: float) -> bool:
        """Whether the version asks to wait for a fuller batch on an idle system; the expirer looks again."""
        enough = min((self._batch_rows, *self._preferred))
        return self.batcher.rows < enough and now - self.batcher.oldest_arrival() < self._delay_s

    def _sized(self, rows: int, now: float) -> int:
        """The largest preferred size that may run and waits; `rows`, which may, where there is none.

        Once the queue delay has passed, what waits is sent as it is: as in Triton, sizes are worth that delay, no more.
        """
        if self._delay_s and self._preferred and now - self.batcher.oldest_arrival() >= self._delay_s:
            return rows
        return max((size for size in self._preferred if size <= min(rows, self.batcher.rows)), default=rows)

    def _least_s(self, first: Request) -> float:
        """The time that the next batch must be worth to its first request.

        While enough others wait to fill it, a smaller one for the sake of a request that is late would make them all late.
        """
        if self.batcher.rows - first.rows >= self._batch_rows:
            return self._estimator.planned_s(first)
        return self._estimator.run_s(first.rows)

    def _put(
        self, batch: list[Request], now: float, attempt: int = 1, losses: int = 0, *, deadlines: bool = True
    ) -> None:
        link = self.link
        rows = sum([request.rows for request in batch])
        # A batch sent ahead hides the way through the queue behind the run before it. Where runs are shorter than the
        # way there is nothing to hide behind: a batch less full than the last only costs more for each request.
        run_s = self._profile.predict(rows)
        self._rows_ahead = min(rows, self._batch_rows) if run_s < SHORT_RUN_S else 0
        name = link.new_name()
        redis_ms = now * 1000 + link.clock.offset_ms
        packed = self._packer.pack(name, link.replies_key, batch, now, redis_ms, deadlines=deadlines)
        outstanding = InFlightBatch(name, self, batch, packed.places, attempt, now, run_s, losses)
        self._pending[name] = outstanding
        self._outstanding += 1
        deadline_ms = redis_ms + (outstanding.earliest - now) * 1000
        self._estimator.put(run_s, now)
        if batch[0].counted:
            self._contention.put(self, now)
        cost_ms = max(run_s * 1000, COST_MS_MIN)
        link.put(self.content_id, name, packed, deadline_ms, attempt, cost_ms, rows / self._batch_rows)
        if packed.segment_bytes:
            self._tallies.segment_bytes.add(packed.segment_bytes)
        if len(self._pending) == 1 and self._spin.seconds:
            self._look_until = now + self._spin.seconds
            if not self._looking:
                self._looking = True
                self._soon(self._look)

    def _look(self) -> None:
        """Keep the event loop turning for a reply that may come any moment: while it turns, nobody has to wake it."""
        self._looking = self._outstanding > 0 and self._clock() < self._look_until
        if self._looking:
            self._soon(self._look)

    def resolve(self, outstanding: InFlightBatch, header: ReplyHeader, inline: memoryview) -> None:
        """A batch came back: its slot goes to the next one first, then its requests are answered."""
        del self._pending[outstanding.name]
        self._outstanding -= 1
        self.replied = self._clock()
        self._estimator.replied(outstanding.run_s, self.replied)
        self._spin.waited(self.replied - outstanding.put, len(outstanding.requests))
        if self.batcher.count:
            self.dispatch()
        requests, failures = outstanding.requests, header.failures
        self._tallies.batch(header, sum([request.counted for request in requests]))
        live = [request for i, request in enumerate(requests) if i not in failures] if failures else requests
        outputs = None
        if live:
            try:
                outputs = self._packer.unpack(header, inline, live)
            except (ValueError, IndexError) as error:
                log.exception("the reply to batch %s cannot be read", outstanding.name)
                self._fail(live, Failure(Code.INTERNAL, f"the reply of the worker cannot be read: {error}"))
            else:
                self._answer(live, outputs, header, outstanding.put)
        for i, (code, message) in failures.items():
            if code == AGAIN:
                self._put_alone(requests[i], outstanding)
            elif code == Code.EXPIRED and requests[i].deadline > self.replied + DOUBT_S and self.link.connected:
                self._put_despite_clocks(requests[i], outstanding)
            elif code == ENDLESS:
                self._fail_endless(requests[i], outstanding, message)
            else:
                self._fail([requests[i]], _failure(requests[i], Code(code), message))
        if self._traces.on:
            self._traces.batch(self.manifest, outstanding, header, live, outputs, self.replied)
        if outstanding.places:
            self._give_back(outstanding, max(outstanding.attempt, header.attempt))

    def _fail_endless(self, request: Request, outstanding: InFlightBatch, message: str) -> None:
        """Its run took longer than any should, and was ended. Whoever sends it again is refused."""
        expired = request.done or request.deadline <= self.replied
        if request.done:  # its deadline passed meanwhile
            request.inputs = outstanding.inputs
        self._quarantine.add(self.content_id, request, ENDED)
        self._circuit_breaker(self.content_id, outstanding.name)
        request.inputs = ()
        self._fail((request,), Failure(Code.EXPIRED if expired else Code.MODEL, message))

    def _put_despite_clocks(self, request: Request, outstanding: InFlightBatch) -> None:
        """A worker took a deadline for passed that is not: a clock was set between two measurements.

        The deadline is ours to keep. It is told none this time, so this happens once.
        """
        if request.done:
            return
        log.warning(
            "a worker took a deadline for passed that is %.3g s away: was the clock of Redis' machine set?",
            request.deadline - self.replied,
        )
        self._put([request], self._clock(), outstanding.attempt, outstanding.losses, deadlines=False)

    def _put_alone(self, request: Request, outstanding: InFlightBatch) -> None:
        """There was no room for its outputs in the reply of its batch."""
        if request.done:
            return
        if self.link.connected and len(outstanding.requests) > 1:
            self._put([request], self._clock(), outstanding.attempt)
        else:
            lost = "there was no room in the reply of its batch, and it cannot be run again: try again"
            self._fail((request,), Failure(Code.UNAVAILABLE, lost, retry_after_s=1))

    def _answer(self, live: list[Request], outputs: Outputs, header: ReplyHeader, put: float) -> None:
        """Answer what still waits in a batch: all of it at once where nobody has left and all have one responder."""
        waiting = [request for request in live if not request.done]
        if not waiting:
            return
        self._done(waiting)
        now = self.replied
        rows = sum([request.rows for request in waiting if request.counted])
        # Before anybody has an answer: whoever has one finds it counted.
        self._tallies.answered(
            [now - request.arrival for request in waiting if request.counted], rows, header, now - put
        )
        responder = waiting[0].responder
        others = [request for request in waiting if request.responder is not responder]
        try:
            if others or len(waiting) < len(live):
                self._answer_each(live, set(map(id, waiting)), outputs)
            else:
                responder.answer(waiting, outputs)
        except Exception:
            log.exception("answers could not be delivered")

    @staticmethod
    def _answer_each(live: list[Request], waiting: set[int], outputs: Outputs) -> None:
        replies = outputs.replies([request.rows for request in live])
        for request, reply in zip(live, replies, strict=True):
            if id(request) in waiting:
                try:
                    request.responder.answer_one(request, reply)
                except Exception:
                    log.exception("an answer could not be delivered")

    def _done(self, requests: Sequence[Request]) -> None:
        """The only place where requests become done. From here on nobody else answers them."""
        for request in requests:
            request.done = True
        self._admission.release(requests)

    def _give_back(self, outstanding: InFlightBatch, attempt: int) -> None:
        if attempt > 1:
            self._quarantined_slices.append((self._clock() + self._rest_s, outstanding.places))
            self._ticking.add(self)
        else:
            self._packer.free(outstanding.places)

    def _fail(self, requests: Sequence[Request], failure: Failure, reason: Reason | None = None) -> None:
        for request in requests:
            if request.done:
                continue
            self._done((request,))
            request.inputs = ()  # nobody runs it any more
            if request.counted:
                self._tallies.failed(failure.code, self._clock() - request.arrival, reason)
            try:
                request.responder.fail(request, failure)
            except Exception:
                log.exception("a failure could not be delivered")

    def cancel(self, request: Request) -> None:
        """The caller went away. What waits is dropped; what has left the lane runs and is not answered."""
        if request.done:
            return
        self._done((request,))
        self._tallies.failed(Code.CANCELLED, self._clock() - request.arrival)
        if not request.taken:
            self.batcher.discard(request)
            if self._waiting is not None:
                self._waiting.leave((request,))

    def expire(self, now: float) -> None:
        """Answer waiting requests whose deadline has passed, or will have by the instant `now`."""
        expired = self.batcher.expire(now)
        if self._waiting is not None:
            expired = [request for request in expired if not self._waits_on(self._waiting, request, now)]
        if expired:
            self._fail(expired, Failure(Code.EXPIRED, "the request waited too long in the queue to meet its deadline"))

    def _waits_on(self, waiting: QueueRules, request: Request, now: float) -> bool:
        """What becomes of a request at the end of its wait; False: its deadline has passed, too."""
        waiting.leave((request,))
        if waiting.requeue_as_delayed(request, now):
            request.taken = False
            waiting.enter(request)
            self.batcher.add(request, None if self._uniform else self._shape(request))
            return True
        if request.answer_by <= now:
            return False
        self._fail((request,), Failure(Code.UNAVAILABLE, "Request timeout expired"), Reason.REJECTED)
        return True

    def expire_outstanding(self, outstanding: InFlightBatch, now: float) -> None:
        """Answer requests of a batch whose deadline passed; give up a batch that nobody will answer any more."""
        late = [request for request in outstanding.requests if request.deadline <= now and not request.done]
        if late:
            if len(outstanding.requests) == 1:
                outstanding.inputs = late[0].inputs  # should it turn out that its run would never end
            self._fail(late, Failure(Code.EXPIRED, "the deadline passed before the model answered"))
        if now > outstanding.latest + ABANDON_S:
            self._forget(outstanding)
            self.dispatch()

    def _forget(self, outstanding: InFlightBatch) -> None:
        del self._pending[outstanding.name]
        self._outstanding -= 1
        self._estimator.gone(outstanding.run_s)
        self.link.withdraw(self.content_id, outstanding.name)
        if outstanding.places:
            self._quarantined_slices.append((self._clock() + self._rest_s, outstanding.places))
            self._ticking.add(self)

    def put_again(self, outstanding: InFlightBatch, why: str = LOST) -> None:
        """A batch was lost, or nobody could read it: what still waits in it is put as a new one.

        `why`: what its requests are told when that has happened too often.
        """
        if not self.link.connected:
            return  # it stays outstanding: when Redis is back, all that is are put again
        self._forget(outstanding)
        left = [request for request in outstanding.requests if not request.done]
        if left and outstanding.losses < LOSSES_MAX:
            self._put(left, self._clock(), outstanding.attempt, outstanding.losses + 1)
            return
        self._fail(left, Failure(Code.UNAVAILABLE, why, retry_after_s=1))
        self.dispatch()

    def give_up(self, outstanding: InFlightBatch) -> None:
        """A worker died with a batch: each of its requests is tried alone. One that a worker dies of again is at fault."""
        if not self.link.connected:
            return
        left = [request for request in outstanding.requests if not request.done]
        self._forget(outstanding)
        if outstanding.attempt >= SUSPECT:
            for request in left:
                self._quarantine.add(self.content_id, request, DIED)
            self._fail(left, Failure(Code.MODEL, "the worker died every time it ran this request"))
        elif self.refused_until > self._clock():
            self._fail(left, self._deadly())
        else:
            for request in left:
                self._put([request], self._clock(), SUSPECT)
        self.dispatch()

    def refuse(self, outstanding: InFlightBatch, reason: str) -> None:
        """Redis would not take the batch."""
        self._fail(outstanding.requests, Failure(Code.UNAVAILABLE, f"the queue refused: {reason}", retry_after_s=1))
        self._forget(outstanding)
        self.dispatch()

    def abandon(self, failure: Failure) -> None:
        """The gateway leaves, and waits no longer: whoever still waits is told so."""
        self._fail(self.batcher.drain(), failure)
        for outstanding in list(self._pending.values()):
            if outstanding.lane is self:
                self._fail(outstanding.requests, failure)

    def tick(self, now: float) -> None:
        """Now and then: deadlines, delayed batches, rested shared memory."""
        if self.batcher.count:
            self.expire(now)
            self.dispatch()
        self._tallies.waiting(self.batcher.count, self.batcher.rows)
        while self._quarantined_slices and self._quarantined_slices[0][0] <= now:
            self._packer.free(self._quarantined_slices.pop(0)[1])
        if self.refused_until and self.refused_until <= now:
            with suppress(Failure):
                self._check_refused()
        if not self.batcher.count and not self._quarantined_slices and not self.refused_until:
            self._ticking.discard(self)

    def close(self) -> None:
        """The version goes. What waits leaves at once: its workers run all that they are sent before they let go of it.

        What they are not sent is told that the version is gone; what is outstanding is still answered.
        """
        now = self._clock()
        self.expire(now)
        while self.batcher.count and self._instances and self.link.writable:
            batch = self.batcher.take(now, self._batch_rows)
            if self._waiting is not None:
                self._waiting.leave(batch)
            self._put_parts(batch, now)
        gone = Failure(
            Code.NOT_FOUND,
            f"Request for unknown model: '{self.manifest.model}' version {self.manifest.version} is not found",
        )
        self._fail(self.batcher.drain(), gone)
        self._tallies.close()


def _failure(request: Request, code: Code, message: str) -> Failure:
    """What the worker says of a request. A model that fails on a tensor without elements was asked for too little."""
    if code is Code.MODEL and any(not tensor.size_bytes and tensor.shape != ABSENT.shape for tensor in request.inputs):
        return Failure(Code.INVALID, f"the model takes no input without elements: {message}")
    return Failure(code, message)
