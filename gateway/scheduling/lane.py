"""The queue of one version in this gateway: admits requests, queues them, and sends batches while credits are free.

add ─> batcher ─(credit free)─> in_flight.put ……… reply ─> completion.resolve ─> credit free, each request answered
Credits are slots in the workers: ready instances x DEPTH. While all are taken, requests wait and batches fill.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from millstream.gateway.placement.refusals import PassedOn
from millstream.gateway.scheduling.admission import LaneAdmission, LaneRefusal
from millstream.gateway.scheduling.answers import Answers
from millstream.gateway.scheduling.batching.batch_split import parts_within
from millstream.gateway.scheduling.batching.batcher import RANK_MAX, Batcher
from millstream.gateway.scheduling.batching.coalescing import Coalescer
from millstream.gateway.scheduling.batching.dispatch import EXPIRE, HOLD, DispatchPolicy
from millstream.gateway.scheduling.batching.queue_policy import QueueRules
from millstream.gateway.scheduling.circuit import Circuit
from millstream.gateway.scheduling.completion import Completion
from millstream.gateway.scheduling.early_put import EarlyPut
from millstream.gateway.scheduling.in_flight import InFlight, InFlightBatch
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.load_report import LaneLoad
from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.pool_context import PoolContext
from millstream.gateway.scheduling.recovery import SUSPECT, Recovery
from millstream.gateway.scheduling.request import Request
from millstream.gateway.scheduling.split_requests import Splits
from millstream.gateway.tensors.outputs import no_rows
from millstream.services.errors import Code, Failure, Subject
from millstream.services.metrics.inference import Reason
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.model.signature import Signature

OVERFLOWING = frozenset({Code.OVERLOADED, Code.UNAVAILABLE, Code.MEMORY})  # refusals of a lane, not of the request
CANNOT_SERVE_RETRY_S = 10.0  # hint to clients of a version that no worker tries again: operators take longer to mend it
RETRY_S_MIN = 1.0  # hint to clients of a version that a worker tries again now


class OtherLanes(Protocol):
    """The lanes of the version in other pools (scheduling/model_route.py)."""

    def overflow(self, refused_by: Lane, request: Request, size_bytes: int, refusal: Failure) -> None:
        """Add a request to one of them, or raise the best refusal."""

    def pass_on(self, refused_by: Lane, requests: Sequence[Request]) -> list[Request]:
        """Move waiting requests to them; return those that none takes."""

    def choose(self) -> None:
        """Move requests if this lane cannot answer them any more, or can again."""


class Lane:
    """The queue of one version in one pool. Call it only in the event loop.

    `failed`: why no instance can serve; None if one can. `retry_at`: when a worker tries a version again that it failed
    to load, in seconds on the Redis clock; 0: none does; set before `update_instances`, as `standby` is: no worker has
    loaded the version, and its next request makes one load it. `held`: whether a live worker of the pool has the
    version, so that batches in flight are answered. `local_workers`: the workers on this host that have it ready.
    `direct_from`: the instant from which batches may be dispatched to them directly. `others`: the version's lanes in
    other pools; None: there are none. `completion` takes the replies to its batches; `recovery` takes batches that were
    lost, refused or expired. `splits` are the requests with more rows than a run takes.

    Args:
        rules: the version's queue rules, if it needs them, which its lanes share; None: the lane has its own.
    """

    def __init__(
        self,
        manifest: Manifest,
        context: PoolContext,
        packer: Packer,
        metrics: LaneMetrics,
        rules: QueueRules | None = None,
    ) -> None:
        config, batching = manifest.config, manifest.signature.batching
        self.manifest = manifest
        self.content_id = manifest.content_id
        self.pool = context.pool
        self.link = context.link
        self.failed: str | None = None
        self.standby = False
        self.retry_at = 0.0
        self._cold = True  # no instance is ready, or none can serve
        self._cold_since = 0.0
        #: when its first instance became ready, after warm-up runs: as good as a reply; on the lane's clock
        self.loaded_at = 0.0
        self.held = False
        self.local_workers: frozenset[str] = frozenset()
        self.direct_from = 0.0
        self.others: OtherLanes | None = None
        self._context = context
        self._packer = packer
        self._metrics = metrics
        self._batcher = Batcher(rank_max=max(RANK_MAX, config.priority_levels))
        self._rules = rules or (QueueRules(config) if QueueRules.needed(config) else None)
        self._uniform = _is_uniform(manifest.signature)
        rows_max = config.rows_max if batching else 1
        rows_sent = min(rows_max, packer.rows_within(context.reply_bytes_max))
        self._policy = DispatchPolicy(config, rows_sent, batching=batching)
        self._rows_max = rows_max
        self.splits = Splits(self, context, self._policy, packer, rows_max)
        self._scheduled = False  # a dispatch is due in the next turn of the event loop, or when coalescing ends
        self._refused_requests = 0
        self._coalescer = Coalescer(
            context.later, lambda: context.admission.requests, lambda: context.soon(self._dispatch_scheduled)
        )
        self.circuit = Circuit(manifest, metrics.refused, context.clock, context.circuit_breaker)
        self._admission = LaneAdmission(manifest.model, context.rows_waiting_max, self._policy, self._batcher, metrics)
        self._in_flight = InFlight(self, context, packer, self._policy, metrics)
        self._early = EarlyPut(self, context)
        self.answers = Answers(context.admission, metrics, context.clock)
        self.recovery = Recovery(
            self.content_id, self._in_flight, self.answers, self.circuit, context.quarantine, self.dispatch
        )
        self.completion = Completion(
            self._in_flight, self.answers, self.recovery, packer, metrics, context, self.dispatch
        )

    @property
    def ready(self) -> bool:
        return self._policy.instances > 0

    @property
    def instances(self) -> int:
        """How many instances are ready."""
        return self._policy.instances

    def awaits(self, batch: InFlightBatch) -> bool:
        """Whether a batch is in flight."""
        return self._in_flight.has(batch)

    @property
    def able(self) -> bool:
        """Whether it answers requests now."""
        return self._policy.instances > 0 and not self.refuses

    @property
    def staffed(self) -> bool:
        """Whether its pool has a worker, which may load the version."""
        return self._context.staffed()

    @property
    def loads(self) -> bool:
        """Whether its pool has the version, or has a worker that may load it."""
        return self.staffed and not self.refuses

    @property
    def answered(self) -> float:
        """How many requests of the version were answered, by its lanes in all pools."""
        return self._metrics.answered_requests

    @property
    def refuses(self) -> bool:
        """Whether it refuses all requests, whatever waits."""
        return self.failed is not None or self.circuit.open_until > 0

    @property
    def run_s(self) -> float:
        """Measured seconds of a run of one row; 0 while nothing was measured."""
        return self._policy.run_s(1)

    @property
    def replied_at(self) -> float:
        """When the last reply came, in seconds on the lane's clock; 0 before the first."""
        return self._in_flight.replied_at

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._batcher.count

    @property
    def rows_waiting(self) -> int:
        return self._batcher.rows + self.splits.rows

    @property
    def rows_done(self) -> int:
        """Rows whose requests were answered, failed or left, and requests that were refused."""
        return self.answers.rows_done + self._refused_requests

    @property
    def row_s(self) -> float:
        """Measured seconds of a row in a full batch; 0 while nothing was measured."""
        return self.full_batch_s / self._policy.batch_rows

    @property
    def full_batch_s(self) -> float:
        """Measured seconds of a full batch; 0 while nothing was measured."""
        return self._policy.run_s(self._policy.batch_rows)

    @property
    def oldest_arrival(self) -> float:
        """When the waiting request arrived that has the earliest deadline; infinity if none waits."""
        return self._batcher.earliest().arrival if self._batcher.count else math.inf

    @property
    def in_flight(self) -> int:
        """How many batches were put and have no reply yet."""
        return self._in_flight.count

    @property
    def load(self) -> LaneLoad:
        """What load balancers are told."""
        policy, in_flight = self._policy, self._in_flight.count
        utilization = min(1.0, in_flight / policy.credits) if policy.credits else 1.0
        return LaneLoad(utilization, self.rows_waiting, in_flight, policy.instances)

    @property
    def idle(self) -> bool:
        return not self._batcher.count and not self._in_flight.count

    @property
    def awaited(self) -> bool:
        """Whether a request waits or is in flight. Readiness probes do not count."""
        if not self._in_flight.count:
            return bool(self._batcher.count)
        return bool(self._batcher.count) or any(
            request.counted and not request.done for batch in self._in_flight.batches() for request in batch.requests
        )

    def update_instances(
        self,
        instances: int,
        profile: Profile,
        rows_efficient: int,
        *,
        same_host: bool,
        failed: str | None,
        batch_format: int | None = None,
        batching_off: bool = False,
    ) -> None:
        """Apply what the workers report about the version.

        Args:
            instances: ready instances.
            profile: measured run times.
            rows_efficient: rows of an efficient run.
            same_host: whether all workers of the version share memory with this gateway.
            failed: why no instance can serve; None if one can, or may still be loaded.
            batch_format: the format that the workers read; None: the newest.
            batching_off: each request runs alone, because rows of this version were found to influence each other.
        """
        now = self._context.clock()
        if self.ready and not instances:
            self._cold_since = now
        elif instances and not self.ready:
            self.loaded_at = now
            self._count_load(ready=True)
        self._cold = failed is not None or not instances
        if failed is not None:
            self._early.forget()
        self._metrics.unloaded = self._cold and not self._early.served
        self._packer.batch_format = batch_format
        self._packer.same_host = same_host
        self.failed = failed
        self._policy.update(instances, profile, rows_efficient, batching_off=batching_off)
        self.splits.batching_off = batching_off
        self._metrics.batching_off(batching_off)
        self._metrics.instances.set(instances)
        self.dispatch()
        if not instances and failed is None and self.awaited:
            self._context.load_again(self)

    def add(self, request: Request, size_bytes: int, *, single: bool = False) -> None:
        """Admit a request: it is sent in the next turn of the event loop, or waits for a credit.

        If this lane cannot take it, a lane of another pool does. `request.lane` is the lane that took it.

        Args:
            request: a request that was not admitted before.
            size_bytes: size of the request's message.
            single: whether its protocol brings one request per turn of the event loop.

        Raises:
            Failure: OVERLOADED (the lane is full, or the answer would come too late), UNAVAILABLE (no instance can
                serve, the circuit is open, the gateway is full), MODEL (the request is in quarantine), INVALID,
                TOO_LARGE (it has more rows than a run takes, and cannot run in parts).
        """
        request.lane = self
        if not 0 < request.rows <= self._rows_max:
            if request.rows:
                self._add_split(request, size_bytes)
            else:
                self._answer_no_rows(request)
            return
        context, batcher, policy = self._context, self._batcher, self._policy
        if self._rules is not None:
            self._rules.prepare(request)
        waiting = batcher.rows
        if not waiting:
            context.ticking.add(self)
        try:
            self._admission.check(request, waiting, self._in_flight.count)
            if self._cold or self.circuit.open_until or not context.quarantine.empty:
                self._check_refused(request)
        except Failure as refusal:
            self._refused(request, size_bytes, refusal)
            return
        context.admission.admit(request, size_bytes)
        if self._rules is not None:
            self._rules.enter(request)
        batcher.add(request, None if self._uniform else self._shape(request))
        if not self._scheduled and self._in_flight.count < policy.credits:
            self._schedule(coalesce=single and context.pressure.full(request.arrival))
        elif self._coalescer.on:
            self._coalescer.joined()

    def _add_split(self, request: Request, size_bytes: int) -> None:
        """Admit a request that has more rows than a run takes. Raises Failure as `add` does."""
        if self._rules is not None:
            self._rules.prepare(request)
        try:
            self.take(request, size_bytes)
        except Failure as refusal:
            self._refused(request, size_bytes, refusal)

    def _refused(self, request: Request, size_bytes: int, refusal: Failure) -> None:
        """Pass a refused request on to the lane of another pool, or raise and count the refusal."""
        try:
            if self.others is None or refusal.code not in OVERFLOWING:
                raise refusal
            self.others.overflow(self, request, size_bytes, refusal)
        except LaneRefusal as final:
            final.counter.add()
            raise

    def take(self, request: Request, size_bytes: int) -> None:
        """Admit a request that the lane of another pool refused, or one in parts. Raises Failure as `add` does."""
        self.check(request)
        self._context.admission.admit(request, size_bytes)
        if request.rows > self._rows_max:
            self.splits.begin(request)
        else:
            self.receive((request,))

    def check(self, request: Request) -> None:
        """Raise Failure if this lane refuses the request, as `add` does; a version that is not loaded is loaded."""
        if request.rows > self._rows_max:
            self.splits.check(request)
            self._admission.check_split(request, self.splits.rows_ahead(request), self._in_flight.count)
        else:
            self._admission.check(request, self._batcher.rows, self._in_flight.count)
        self._check_refused(request)

    def enter(self, parts: Sequence[Request]) -> None:
        """Let parts of an admitted request wait. Raises Failure: UNAVAILABLE, MODEL, as `add` does."""
        for part in parts:
            self._check_served(part)
        self._context.ticking.add(self)
        self._enter(parts)

    def move_to(self, other: Lane) -> int:
        """Move the requests of this lane, which cannot answer them, to the lane of another pool. Return how many.

        Batches in flight are withdrawn if no worker is left that may answer them; a reply that comes all the same finds
        no batch. A request that may have killed a worker runs alone there, too.
        """
        moved = len(self.splits.open)
        other.splits.adopt(self.splits.open)
        waiting = self._batcher.drain()
        if self._rules is not None:
            self._rules.leave(waiting)
        other.receive(waiting)
        withdrawn = [] if self.held else self.recovery.withdraw()
        for some, attempt in withdrawn:
            other.receive(some, attempt)
        requests = [*waiting, *[one for some, _ in withdrawn for one in some]]
        moved += sum([not one.part for one in requests])
        if moved:
            self.overflowed(moved)
        return moved

    def receive(self, requests: Sequence[Request], attempt: int = 1) -> None:
        """Take over admitted requests from the lane of another pool.

        Args:
            requests: they wait here until their deadline; none is refused.
            attempt: of the batch that they were in; from SUSPECT on each of them runs alone.
        """
        self.splits.adopt([request.split for request in requests if request.split is not None])
        if attempt >= SUSPECT:
            for request in requests:
                request.lane = self
                self._in_flight.retry([request], attempt)
        elif requests:
            self._context.ticking.add(self)
            self._enter(requests)

    def overflowed(self, requests: int) -> None:
        """Count requests that this lane's pool did not answer and another one took."""
        self._metrics.overflowed(requests)

    def _enter(self, requests: Iterable[Request]) -> None:
        """Let admitted requests wait, and dispatch in the next turn of the event loop."""
        for request in requests:
            request.taken = False
            request.lane = self
            if self._rules is not None:
                self._rules.enter(request)
            self._batcher.add(request, None if self._uniform else self._shape(request))
        if not self._scheduled:
            self._schedule(coalesce=False)

    def _answer_no_rows(self, request: Request) -> None:
        """Answer a request for no rows without a run. Raises Failure(UNAVAILABLE).

        The signature already gives the answer, and many models fail on an empty batch.
        """
        if self.failed is not None:
            raise self._cannot_serve()
        request.done = True
        self._metrics.answered_without_run(request.responder.protocol, self._context.clock() - request.arrival)
        request.responder.answer_one(request, no_rows(self.manifest.answered))

    def _check_served(self, request: Request) -> None:
        """Raise Failure: UNAVAILABLE (no instance can serve, or the circuit is open), MODEL (in quarantine)."""
        if self.failed is not None:
            raise self._cannot_serve()
        if self.circuit.open_until:
            self.circuit.check()
        if not self._context.quarantine.empty:
            self._context.quarantine.check(self.content_id, request)

    def _check_refused(self, request: Request) -> None:
        """Raise Failure as `_check_served` does.

        Have the version loaded if no worker has it. Raises Failure also if that takes too long (OVERLOADED).
        """
        self._check_served(request)
        if self._cold:
            cold = not self._early.served
            try:
                self._context.load_for(self, request)
            except PassedOn:
                cold = False  # it counts in the pool that takes it
                raise
            finally:
                if cold:
                    self._metrics.cold()
            if not self._scheduled:
                self._schedule(coalesce=False)

    def _cannot_serve(self) -> Failure:
        return Failure(
            Code.UNAVAILABLE,
            f"model '{self.manifest.model}' cannot serve: {self.failed}",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> float:
        """Return the seconds until a worker tries the version again; CANNOT_SERVE_RETRY_S if none says so."""
        left_s = self.retry_at - self.link.clock.now_ms() / 1000
        return max(RETRY_S_MIN, left_s) if self.retry_at else CANNOT_SERVE_RETRY_S

    def _shape(self, request: Request) -> Hashable:
        if self.manifest.signature.batching:
            return tuple(tensor.shape[1:] for tensor in request.inputs)
        return tuple(tensor.shape for tensor in request.inputs)

    def record_rejection(self, protocol: str, code: Code) -> None:
        """Count a request that was refused, or could not be read, before it was admitted."""
        self._metrics.record_rejection(protocol, code)
        if code in OVERFLOWING:
            self._refused_requests += 1
            self._context.called.add(self)

    def probe(self, request: Request) -> None:
        """Send a readiness probe in a batch of its own, apart from requests that are counted.

        Skipped while requests wait or all credits are taken: their replies prove readiness as well. Raises Failure.
        """
        if self._batcher.count or self._in_flight.count >= self._policy.credits or not self.link.writable:
            return
        self._context.admission.admit(request, 0)
        request.counted, request.taken = False, True
        self._in_flight.put([request], self._context.clock())

    def cancel(self, request: Request) -> None:
        """Drop a request whose caller went away. A request in flight still runs, but gets no reply."""
        if request.done:
            return
        if request.split is not None:
            request.split.cancel()
            return
        if request.taken:
            self._in_flight.outlive(request)
        self.answers.cancel(request)
        if not request.taken:
            self._discard(request)

    def drop(self, part: Request) -> None:
        """Drop a part whose request has ended. A part in flight still runs."""
        part.done = True
        if part.taken:
            self._in_flight.outlive(part)
        else:
            self._discard(part)

    def _discard(self, request: Request) -> None:
        """Remove a waiting request that is done."""
        self._batcher.discard(request)
        if self._rules is not None:
            self._rules.leave((request,))

    def dispatch(self) -> None:
        """Send batches while credits are free and requests wait."""
        if self._coalescer.on:
            return
        if self._cold:
            self._dispatch_early()
        context, batcher, policy, in_flight = self._context, self._batcher, self._policy, self._in_flight
        while batcher.count and in_flight.count < policy.credits and self.link.writable:
            now = context.clock()
            others_active = context.contention.others_active(self, now)
            if others_active is not policy.others_active:
                policy.share_pool(others_active)
            rows = policy.rows_to_take(batcher, in_flight.count, now)
            if rows == HOLD:
                return
            if rows == EXPIRE:
                self._expire(batcher.earliest().deadline)
            else:
                self._send(rows, now)

    def _dispatch_early(self) -> None:
        """Put one request of a version that is being loaded, unless its queue rules say how long it waits here."""
        batcher, now = self._batcher, self._context.clock()
        self._count_load(ready=False)
        if not batcher.count or self._rules is not None or self._policy.credits:
            return
        first = batcher.earliest()
        if first.deadline > now and self._early.allows(first):
            batch = batcher.take(now, first.rows)
            self._early.put(batch, now)
            self._in_flight.put(batch, now)

    def _count_load(self, *, ready: bool) -> None:
        """Count how long requests waited for a load that has ended. `ready`: a record says that it has."""
        waits = self._early.loaded(self._batcher.arrivals(), self._context.clock(), ready=ready)
        if waits:
            self._metrics.loaded(waits)
            self._metrics.unloaded = False

    def _schedule(self, *, coalesce: bool) -> None:
        """Dispatch in the next turn of the event loop, so that other requests of this turn share the batch."""
        self._scheduled = True
        if coalesce:
            self._coalescer.begin()
        else:
            self._context.soon(self._dispatch_scheduled)

    def _dispatch_scheduled(self) -> None:
        self._scheduled = False
        self.dispatch()

    def _send(self, rows: int, now: float) -> None:
        """Send the next `rows` rows as one batch, or as several if they exceed the batch's limit in bytes."""
        batch = self._batcher.take(now, rows)
        if self._rules is not None:
            self._rules.leave(batch)
        bytes_max = self._context.batch_bytes_max
        # The bytes of all requests in this gateway bound those of this batch.
        if self._context.admission.bytes <= bytes_max:
            self._in_flight.put(batch, now)
            return
        for part in parts_within(batch, bytes_max):
            self._in_flight.put(part, now)

    def _expire(self, now: float) -> None:
        """Answer waiting requests whose deadline has passed by the instant `now`, which may be in the future."""
        expired = self._batcher.expire(now)
        if self._rules is not None:
            expired = [request for request in expired if not self._end_wait(self._rules, request, now)]
        if expired:
            self.answers.fail(expired, Failure(Code.EXPIRED, self._why_late()))

    def _why_late(self) -> str:
        """Return why a waiting request missed its deadline."""
        if not self._context.staffed():
            return f"the deadline of the request passed while pool {self._context.pool} had no worker"
        if not self.ready:
            return "the deadline of the request passed before its model was loaded"
        return "the request waited too long in the queue to meet its deadline"

    def _end_wait(self, rules: QueueRules, request: Request, now: float) -> bool:
        """Requeue or refuse a request at the end of its wait, as the version's queue policy says.

        Returns False, and does neither, if the deadline of its answer has passed, too.
        """
        rules.leave((request,))
        if rules.requeue_as_delayed(request, now):
            request.taken = False
            rules.enter(request)
            self._batcher.add(request, None if self._uniform else self._shape(request))
            return True
        if request.answer_by <= now:
            return False
        self.answers.fail((request,), Failure(Code.UNAVAILABLE, "Request timeout expired"), Reason.REJECTED)
        return True

    def tick(self, now: float) -> None:
        """Handle expired requests, delayed batches, cooling shared memory and the circuit. The expirer calls this."""
        batcher = self._batcher
        if batcher.count:
            self._expire(now)
            self.dispatch()
        if self.splits.open:
            self.splits.tick(now)
        self._show_waiting()
        cooling = self._in_flight.tick(now)
        if self.circuit.open_until and self.circuit.open_until <= now:
            with suppress(Failure):
                self.circuit.check()
                if self.others is not None:
                    self.others.choose()
        if not batcher.count and not cooling and not self.circuit.open_until and not self.splits.open:
            self._context.ticking.discard(self)

    def _show_waiting(self) -> None:
        requests, rows = self._batcher.count, self._batcher.rows
        if self.splits.open:
            split, parts = self.splits.requests_waiting()
            requests, rows = requests + split - parts, self.rows_waiting
        self._metrics.waiting(requests, rows)

    def block(self, deaths: int, seconds: float) -> None:
        """Refuse waiting and new requests for `seconds`: the version recently ended its worker `deaths` times.

        If the lane of another pool can answer them, it gets them.
        """
        self.circuit.open(deaths, seconds)
        if self.others is not None:
            self.others.choose()
        waiting = self._batcher.drain()
        if self._rules is not None:
            self._rules.leave(waiting)
        self.answers.fail(waiting, self.circuit.failure())
        self._in_flight.take_back()
        self._context.ticking.add(self)

    def refuse_cold(self, failure: Failure) -> None:
        """Fail the waiting requests that came while no instance was ready and that no other pool takes.

        Earlier ones were accepted by a version that was ready: they wait until it is loaded again.
        """
        waiting = self._batcher.drain()
        if self._rules is not None:
            self._rules.leave(waiting)
        waiting += self.recovery.withdraw_put_since(self._cold_since)
        if self.others is not None:
            waiting = self.others.pass_on(self, waiting)
        self._enter([request for request in waiting if request.arrival < self._cold_since])
        self.answers.fail([one for one in waiting if one.arrival >= self._cold_since], failure)

    def abandon(self, failure: Failure) -> None:
        """Fail every request that waits or is in flight, because the gateway stops."""
        self.answers.fail(self._batcher.drain(), failure)
        for batch in self._in_flight.batches():
            self.answers.fail(batch.requests, failure)

    def close(self, *, version_removed: bool = True) -> None:
        """Send the waiting requests of a removed version: its workers run them before they unload it.

        `version_removed` False: only this pool no longer serves it.

        Requests that cannot be sent fail with NOT_FOUND, and so do those in flight if no worker has the version ready.
        Other batches in flight are still answered.
        """
        now = self._context.clock()
        self.splits.flush()
        self._expire(now)
        while self._batcher.count and self.ready and self.link.writable:
            self._send(self._policy.batch_rows, now)
        not_found = Failure(
            Code.NOT_FOUND,
            f"Request for unknown model: '{self.manifest.model}' version {self.manifest.version} is not found",
            subject=Subject.VERSION,
        )
        self.answers.fail(self._batcher.drain(), not_found)
        if version_removed and not self.ready:
            for requests, _ in self.recovery.withdraw():
                self.answers.fail(requests, not_found)
        self._metrics.close(version_removed=version_removed)


def _is_uniform(signature: Signature) -> bool:
    """Whether the inputs of all requests have equal shapes, apart from the rows."""
    first = 1 if signature.batching else 0
    return all(not spec.optional and min(spec.shape[first:], default=0) >= 0 for spec in signature.inputs)
