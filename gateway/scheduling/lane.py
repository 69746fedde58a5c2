"""The queue of one version in this gateway: admits requests, queues them, and sends batches while credits are free.

add ─> dispatcher ─(credit free)─> in_flight.put ……… reply ─> completion.resolve ─> credit free, each request answered
Credits are slots in the workers: ready instances x DEPTH. While all are taken, requests wait and batches fill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from millstream.gateway.placement.decision import PassedOn
from millstream.gateway.scheduling.admission import Answers, Circuit, LaneAdmission, LaneRefusal
from millstream.gateway.scheduling.batching.dispatch import DispatchPolicy
from millstream.gateway.scheduling.batching.queue_policy import QueueRules
from millstream.gateway.scheduling.completion import SUSPECT, Completion, Recovery
from millstream.gateway.scheduling.dispatcher import Dispatcher
from millstream.gateway.scheduling.in_flight import InFlight
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.lane_state import LaneState, PoolContext
from millstream.gateway.scheduling.load_report import LaneLoad
from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.request import Request
from millstream.gateway.scheduling.split_requests import SplitRequest, Splits
from millstream.gateway.tensors.outputs import no_rows
from millstream.services.errors import Code, Failure, Subject
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile

OVERFLOWING = frozenset({Code.OVERLOADED, Code.UNAVAILABLE, Code.MEMORY})  # refusals of a lane, not of the request


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

    `state`: what its parts and those who watch it know of it. `completion` takes the replies to its batches; `recovery`
    takes batches that were lost, refused or expired; `dispatcher` has the requests that wait. `splits` are the requests
    with more rows than a run takes.

    Args:
        rules: the version's queue rules, if it needs them, which its lanes share; None: the lane has its own.
        others: the version's lanes in other pools; they count unless `state.alone`.
    """

    def __init__(
        self,
        manifest: Manifest,
        context: PoolContext,
        packer: Packer,
        metrics: LaneMetrics,
        rules: QueueRules | None = None,
        others: OtherLanes | None = None,
    ) -> None:
        config, batching = manifest.config, manifest.signature.batching
        self._rows_max = config.rows_max if batching else 1
        rows_sent = min(self._rows_max, packer.rows_within(context.reply_bytes_max))
        self.policy = policy = DispatchPolicy(config, rows_sent, batching=batching, streams=manifest.streams)
        self.state = state = LaneState(manifest, context, packer, metrics, policy)
        self.manifest, self.content_id, self.pool, self.link = manifest, state.content_id, state.pool, state.link
        self.metrics = metrics
        self._others = others
        self._context = context
        self.circuit = circuit = Circuit(state)
        self._answers = answers = Answers(state)
        self._in_flight = in_flight = InFlight(state)
        self.dispatcher = dispatcher = Dispatcher(state, in_flight, answers, rules)
        self._batcher, self._rules = dispatcher.batcher, dispatcher.rules
        self._admission = LaneAdmission(state, self._batcher, circuit)
        self.splits = Splits(state, self._admission, dispatcher, self._rows_max)
        self.recovery = Recovery(state, in_flight, answers, circuit, dispatcher)
        self.completion = Completion(state, in_flight, answers, self.recovery, dispatcher)

    @property
    def ready(self) -> bool:
        return self.state.instances > 0

    @property
    def can_serve(self) -> bool:
        """Whether it answers requests now."""
        return self.state.instances > 0 and not self.refuses

    @property
    def has_workers(self) -> bool:
        """Whether its pool has a worker, which may load the version."""
        return self._context.owner.has_workers(self.pool)

    @property
    def loadable(self) -> bool:
        """Whether its pool has the version, or has a worker that may load it."""
        return self.has_workers and not self.refuses

    @property
    def refuses(self) -> bool:
        """Whether it refuses all requests, whatever waits."""
        return self.state.failed is not None or self.circuit.open_until > 0

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._batcher.count

    @property
    def rows_waiting(self) -> int:
        return self._batcher.rows + self.splits.rows

    @property
    def oldest_arrival(self) -> float:
        """When the waiting request arrived that has the earliest deadline; infinity if none waits."""
        return self._batcher.earliest().arrival if self._batcher.count else math.inf

    @property
    def load(self) -> LaneLoad:
        """What load balancers are told."""
        in_flight, in_flight_max = self.state.in_flight, self.policy.credits
        utilization = min(1.0, in_flight / in_flight_max) if in_flight_max else 1.0
        return LaneLoad(utilization, self.rows_waiting, in_flight, self.state.instances)

    @property
    def idle(self) -> bool:
        return not self._batcher.count and not self.state.in_flight

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or is in flight. Readiness probes do not count."""
        if not self.state.in_flight:
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
        state, now = self.state, self._context.clock()
        if state.instances and not instances:
            state.cold_since = now
        elif instances and not state.instances:
            state.loaded_at = now
            self.dispatcher.count_load(ready=True)
        state.instances = instances
        state.failed = failed
        state.cold = failed is not None or not instances
        early = self.dispatcher.early
        if failed is not None:
            early.forget()
        self.metrics.unloaded = state.cold and not early.served
        state.packer.batch_format = batch_format
        state.packer.same_host = same_host
        self.policy.update(instances, profile, rows_efficient, batching_off=batching_off)
        self.splits.batching_off = batching_off
        self.metrics.batching_off(batching_off)
        self.metrics.instances.set(instances)
        self.dispatcher.dispatch()
        if not instances and failed is None and self.has_requests:
            self._context.owner.load_again(self)

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
        context, state = self._context, self.state
        if self._rules is not None:
            self._rules.prepare(request)
        if not self._batcher.count:
            context.timed.add(state)
        try:
            self._admission.check(request)
            if state.cold or self.circuit.open_until or not context.quarantine.empty:
                self._check_refused(request)
        except Failure as refusal:
            self._refused(request, size_bytes, refusal)
            return
        context.admission.admit(request, size_bytes)
        self.dispatcher.add(request, single=single)

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
            if self._others is None or self.state.alone or refusal.code not in OVERFLOWING:
                raise refusal
            self._others.overflow(self, request, size_bytes, refusal)
        except LaneRefusal as final:
            final.counter.add()
            raise

    def take(self, request: Request, size_bytes: int) -> None:
        """Admit a request that the lane of another pool refused, or one in parts. Raises Failure as `add` does."""
        self.check(request)
        self._context.admission.admit(request, size_bytes)
        if request.rows > self._rows_max:
            request.lane = self
            self.splits.begin(request)
        else:
            self.receive((request,))

    def check(self, request: Request) -> None:
        """Raise Failure if this lane refuses the request, as `add` does; a version that is not loaded is loaded."""
        if request.rows > self._rows_max:
            self.splits.check(request)
            self._admission.check_split(request, self.splits.rows_ahead(request))
        else:
            self._admission.check(request)
        self._check_refused(request)

    def move_to(self, other: Lane) -> int:
        """Move the requests of this lane, which cannot answer them, to the lane of another pool. Return how many.

        Batches in flight are withdrawn if no worker is left that may answer them; a reply that comes all the same finds
        no batch. A request that may have killed a worker runs alone there, too.
        """
        moved = len(self.splits.open)
        other.splits.adopt(self.splits.open, other)
        waiting = self.dispatcher.drain()
        other.receive(waiting)
        withdrawn = [] if self.state.held else self.recovery.withdraw()
        for some, attempt in withdrawn:
            other.receive(some, attempt)
        requests = [*waiting, *[one for some, _ in withdrawn for one in some]]
        moved += sum([not one.part for one in requests])
        if moved:
            self.metrics.overflowed(moved)
        return moved

    def receive(self, requests: Sequence[Request], attempt: int = 1) -> None:
        """Take over admitted requests from the lane of another pool.

        Args:
            requests: they wait here until their deadline; none is refused.
            attempt: of the batch that they were in; from SUSPECT on each of them runs alone.
        """
        self.splits.adopt([one.split for one in requests if isinstance(one.split, SplitRequest)], self)
        for request in requests:
            request.lane = self
        if attempt >= SUSPECT:
            for request in requests:
                self._in_flight.retry([request], attempt)
        elif requests:
            self._context.timed.add(self.state)
            self.dispatcher.enter(requests)

    def _answer_no_rows(self, request: Request) -> None:
        """Answer a request for no rows without a run. Raises Failure(UNAVAILABLE).

        The signature already gives the answer, and many models fail on an empty batch.
        """
        if self.state.failed is not None:
            raise self._admission.cannot_serve()
        request.done = True
        self.metrics.answered_without_run(request.responder.protocol, self._context.clock() - request.arrival)
        request.responder.answer_one(request, no_rows(self.manifest.answered))

    def _check_refused(self, request: Request) -> None:
        """Raise Failure as `LaneAdmission.check_served` does.

        Have the version loaded if no worker has it. Raises Failure also if that takes too long (OVERLOADED).
        """
        self._admission.check_served(request)
        if self.state.cold:
            cold = not self.dispatcher.early.served
            try:
                self._context.owner.load_for(self, request)
            except PassedOn:
                cold = False  # it counts in the pool that takes it
                raise
            finally:
                if cold:
                    self.metrics.cold()
            if not self.dispatcher.scheduled:
                self.dispatcher.schedule()

    def record_rejection(self, protocol: str, code: Code) -> None:
        """Count a request that was refused, or could not be read, before it was admitted."""
        self.metrics.record_rejection(protocol, code)
        if code in OVERFLOWING:
            self.state.rows_done += 1
            self._context.used.add(self.state)

    def probe(self, request: Request) -> None:
        """Send a readiness probe in a batch of its own, apart from requests that are counted.

        Skipped while requests wait or all credits are taken: their replies prove readiness as well. Raises Failure.
        """
        if self._batcher.count or self.state.in_flight >= self.policy.credits or not self.link.writable:
            return
        self._context.admission.admit(request, 0)
        request.counted, request.taken = False, True
        self._in_flight.put([request], self._context.clock())

    def cancel(self, request: Request) -> None:
        """Drop a request whose caller went away, or a part. One in flight still runs, but gets no reply."""
        if request.done:
            return
        if request.split is not None and not request.part:
            request.split.cancel()
            return
        if request.taken:
            self._in_flight.outlive(request)
        if request.part:
            request.done = True
        else:
            self._answers.cancel(request)
        if not request.taken:
            self.dispatcher.discard(request)

    def tick(self, now: float) -> None:
        """Handle expired requests, delayed batches, cooling shared memory and the circuit. The expirer calls this."""
        batcher = self._batcher
        if batcher.count:
            self.dispatcher.expire(now)
            self.dispatcher.dispatch()
        if self.splits.open:
            self.splits.tick(now)
        requests, rows = batcher.count, batcher.rows
        if self.splits.open:
            split, parts = self.splits.requests_waiting()
            requests, rows = requests + split - parts, self.rows_waiting
        self.metrics.waiting(requests, rows)
        cooling = self._in_flight.tick(now)
        if self.circuit.open_until and self.circuit.open_until <= now:
            with suppress(Failure):
                self.circuit.check()
                if self._others is not None:
                    self._others.choose()
        if not batcher.count and not cooling and not self.circuit.open_until and not self.splits.open:
            self._context.timed.discard(self.state)

    def block(self, deaths: int, seconds: float) -> None:
        """Refuse waiting and new requests for `seconds`: the version recently ended its worker `deaths` times.

        If the lane of another pool can answer them, it gets them.
        """
        self.circuit.open(deaths, seconds)
        if self._others is not None:
            self._others.choose()
        self._answers.fail(self.dispatcher.drain(), self.circuit.failure())
        self._in_flight.take_back()
        self._context.timed.add(self.state)

    def refuse_cold(self, failure: Failure) -> None:
        """Fail the waiting requests that came while no instance was ready and that no other pool takes.

        Earlier ones were accepted by a version that was ready: they wait until it is loaded again.
        """
        cold_since = self.state.cold_since
        waiting = self.dispatcher.drain() + self.recovery.withdraw_put_since(cold_since)
        if self._others is not None and not self.state.alone:
            waiting = self._others.pass_on(self, waiting)
        self.dispatcher.enter([request for request in waiting if request.arrival < cold_since])
        self._answers.fail([one for one in waiting if one.arrival >= cold_since], failure)

    def abandon(self, failure: Failure) -> None:
        """Fail every request that waits or is in flight, because the gateway stops."""
        self._answers.fail(self.dispatcher.drain(), failure)
        for batch in self._in_flight.batches():
            self._answers.fail(batch.requests, failure)

    def close(self, *, version_removed: bool = True) -> None:
        """Send the waiting requests of a removed version: its workers run them before they unload it.

        `version_removed` False: only this pool no longer serves it.

        Requests that cannot be sent fail with NOT_FOUND, and so do those in flight if no worker has the version ready.
        Other batches in flight are still answered.
        """
        self.splits.flush()
        self.dispatcher.expire(self._context.clock())
        if self.ready:
            self.dispatcher.send_all()
        not_found = Failure(
            Code.NOT_FOUND,
            f"Request for unknown model: '{self.manifest.model}' version {self.manifest.version} is not found",
            subject=Subject.VERSION,
        )
        self._answers.fail(self.dispatcher.drain(), not_found)
        if version_removed and not self.ready:
            for requests, _ in self.recovery.withdraw():
                self._answers.fail(requests, not_found)
        self.metrics.close(version_removed=version_removed)
