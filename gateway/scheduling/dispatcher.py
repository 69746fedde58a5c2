"""Lets the admitted requests of one lane wait, and sends them in batches while credits are free.

enter ─> batcher ─(credit free)─> in_flight.put            a deadline passes ─> answers.fail, or it waits again
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from millstream.gateway.scheduling.admission import Answers
from millstream.gateway.scheduling.batching.batcher import RANK_MAX, Batcher
from millstream.gateway.scheduling.batching.coalescing import Coalescer
from millstream.gateway.scheduling.batching.dispatch import EXPIRE, HOLD
from millstream.gateway.scheduling.batching.queue_policy import QueueRules
from millstream.gateway.scheduling.in_flight import InFlight
from millstream.gateway.scheduling.lane_state import LaneState
from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.metrics.inference import Reason
from millstream.services.model.signature import Signature
from millstream.services.wire.batch import INLINE_BYTES_MAX

#: Cold lanes of a pool with a request ahead, in one gateway; beyond it requests wait in the gateway. The queue's
#: scripts look at each lane that has batches, also if no worker serves it.
EARLY_LANES_MAX = 16


class EarlyPut:
    """The request that one lane has ahead while no instance is ready.

    `served`: a worker has answered it, and no record that the gateway has read says that the version is ready.
    """

    __slots__ = ("_arrivals", "_lane", "_put_at", "served")

    def __init__(self, lane: LaneState) -> None:
        self.served = False
        self._lane = lane
        self._arrivals: Sequence[float] = ()  # requests ahead whose wait was not counted
        self._put_at = 0.0

    def allows(self, first: Request) -> bool:
        """Return whether `first`, which waits, may be put now: one at a time, and only what its entry contains."""
        context, lane = self._lane.context, self._lane
        if lane.failed is not None or not lane.alone or lane.in_flight:
            return False
        if not context.owner.reads_newest(lane.pool) or not lane.link.writable:
            return False
        if sum([tensor.size_bytes for tensor in first.inputs]) > INLINE_BYTES_MAX:
            return False
        early = context.early
        if len(early) >= EARLY_LANES_MAX:
            early.intersection_update([one for one in early if one.in_flight and not one.instances])
        return len(early) < EARLY_LANES_MAX

    def put(self, requests: Sequence[Request], now: float) -> None:
        """Note that these requests are put now."""
        self._lane.context.early.add(self._lane)
        self._put_at = now
        self._arrivals = [request.arrival for request in requests]

    def loaded(self, waiting: Iterable[float], now: float, *, ready: bool) -> list[float]:
        """Return for how many seconds requests waited for a load that has ended; [] if none has, or they are counted.

        Args:
            waiting: arrivals of the requests that wait in the gateway.
            now: the current instant.
            ready: whether the gateway reads now in a record that the version is ready.
        """
        lane = self._lane
        if self.served:
            self.served = not ready
            return []
        answered = bool(self._arrivals) and not lane.in_flight and lane.replied_at >= self._put_at
        if not ready and not answered:
            return []
        waits = [now - arrival for arrival in (*self._arrivals, *waiting)]
        self._arrivals, self.served = (), not ready
        return waits

    def forget(self) -> None:
        """Forget what was put: no instance can serve."""
        self._arrivals, self.served = (), False


class Dispatcher:
    """The waiting requests of one lane, and when they leave.

    `batcher`: has the requests. `rules`: the version's queue rules; None: it needs none. `scheduled`: a dispatch is due
    in the next turn of the event loop, or when coalescing ends. `early`: sends one request of a cold version. `answers`
    answers requests that do not leave.
    """

    __slots__ = (
        "_coalescer",
        "_context",
        "_in_flight",
        "_lane",
        "_uniform",
        "answers",
        "batcher",
        "early",
        "rules",
        "scheduled",
    )

    def __init__(self, lane: LaneState, in_flight: InFlight, answers: Answers, rules: QueueRules | None) -> None:
        config = lane.manifest.config
        self._lane = lane
        self._context = context = lane.context
        self._in_flight = in_flight
        self.answers = answers
        self.batcher = Batcher(rank_max=max(RANK_MAX, config.priority_levels))
        self.rules = rules or (QueueRules(config) if QueueRules.needed(config) else None)
        self.scheduled = False
        self.early = EarlyPut(lane)
        self._uniform = _is_uniform(lane.manifest.signature)
        admission, soon = context.admission, context.soon
        self._coalescer = Coalescer(context.later, lambda: admission.requests, lambda: soon(self._dispatch_scheduled))

    def add(self, request: Request, *, single: bool) -> None:
        """Let a request wait that was just admitted. `single`: its protocol brings one in a turn of the event loop."""
        self._queue(request)
        if not self.scheduled and self._lane.in_flight < self._lane.policy.credits:
            self.schedule(coalesce=single and self._context.pressure.full(request.arrival))
        elif self._coalescer.on:
            self._coalescer.joined()

    def enter(self, requests: Iterable[Request]) -> None:
        """Let requests wait that were admitted before, and dispatch in the next turn of the event loop."""
        for request in requests:
            request.taken = False
            self._queue(request)
        if not self.scheduled:
            self.schedule()

    def _queue(self, request: Request) -> None:
        if self.rules is not None:
            self.rules.enter(request)
        shape: Hashable = None
        if not self._uniform:
            rest = 1 if self._lane.manifest.signature.batching else 0
            shape = tuple(tensor.shape[rest:] for tensor in request.inputs)
        self.batcher.add(request, shape)

    def discard(self, request: Request) -> None:
        """Remove a waiting request that is done."""
        self.batcher.discard(request)
        if self.rules is not None:
            self.rules.leave((request,))

    def drain(self) -> list[Request]:
        """Remove all waiting requests, and return them."""
        waiting = self.batcher.drain()
        if self.rules is not None:
            self.rules.leave(waiting)
        return waiting

    def schedule(self, *, coalesce: bool = False) -> None:
        """Dispatch in the next turn of the event loop, so that other requests of this turn share the batch."""
        self.scheduled = True
        if coalesce:
            self._coalescer.begin()
        else:
            self._context.soon(self._dispatch_scheduled)

    def _dispatch_scheduled(self) -> None:
        self.scheduled = False
        self.dispatch()

    def dispatch(self) -> None:
        """Send batches while credits are free and requests wait."""
        if self._coalescer.on:
            return
        lane = self._lane
        if lane.cold:
            self._dispatch_early()
        context, batcher, policy = self._context, self.batcher, lane.policy
        while batcher.count and lane.in_flight < policy.credits and context.link.writable:
            now = lane.clock()
            others_active = context.contention.others_active(lane, now)
            if others_active is not policy.others_active:
                policy.share_pool(others_active)
            rows = policy.rows_to_take(batcher, lane.in_flight, now)
            if rows == HOLD:
                return
            if rows == EXPIRE:
                self.expire(batcher.earliest().deadline)
            else:
                self._send(rows, now)

    def send_all(self) -> None:
        """Send all waiting requests, whatever credits are free, as far as Redis takes batches."""
        while self.batcher.count and self._context.link.writable:
            self._send(self._lane.policy.batch_rows, self._lane.clock())

    def _dispatch_early(self) -> None:
        """Put one request of a version that is being loaded, unless its queue rules say how long it waits here."""
        batcher, now = self.batcher, self._lane.clock()
        self.count_load(ready=False)
        if not batcher.count or self.rules is not None or self._lane.policy.credits:
            return
        first = batcher.earliest()
        if first.deadline > now and self.early.allows(first):
            batch = batcher.take(now, first.rows)
            self.early.put(batch, now)
            self._in_flight.put(batch, now)

    def count_load(self, *, ready: bool) -> None:
        """Count how long requests waited for a load that has ended. `ready`: a record says that it has."""
        waits = self.early.loaded(self.batcher.arrivals(), self._lane.clock(), ready=ready)
        if waits:
            self._lane.metrics.loaded(waits)
            self._lane.metrics.unloaded = False

    def _send(self, rows: int, now: float) -> None:
        """Send the next `rows` rows as one batch, or as several if they exceed the batch's limit in bytes."""
        batch = self.batcher.take(now, rows)
        if self.rules is not None:
            self.rules.leave(batch)
        bytes_max = self._context.batch_bytes_max
        # The bytes of all requests in this gateway bound those of this batch.
        if self._context.admission.bytes <= bytes_max:
            self._in_flight.put(batch, now)
            return
        for part in parts_within(batch, bytes_max):
            self._in_flight.put(part, now)

    def expire(self, now: float) -> None:
        """Answer waiting requests whose deadline has passed by the instant `now`, which may be in the future."""
        expired = self.batcher.expire(now)
        if self.rules is not None:
            expired = [request for request in expired if not self._end_wait(self.rules, request, now)]
        if expired:
            self.answers.fail(expired, Failure(Code.EXPIRED, self._why_late()))

    def _why_late(self) -> str:
        """Return why a waiting request missed its deadline."""
        if not self._context.owner.has_workers(self._lane.pool):
            return f"the deadline of the request passed while pool {self._lane.pool} had no worker"
        if not self._lane.instances:
            return "the deadline of the request passed before its model was loaded"
        return "the request waited too long in the queue to meet its deadline"

    def _end_wait(self, rules: QueueRules, request: Request, now: float) -> bool:
        """Requeue or refuse a request at the end of its wait, as the version's queue policy says.

        Returns False, and does neither, if the deadline of its answer has passed, too.
        """
        rules.leave((request,))
        if rules.requeue_as_delayed(request, now):
            request.taken = False
            self._queue(request)
            return True
        if request.answer_by <= now:
            return False
        self.answers.fail((request,), Failure(Code.UNAVAILABLE, "Request timeout expired"), Reason.REJECTED)
        return True


def _is_uniform(signature: Signature) -> bool:
    """Whether the inputs of all requests have equal shapes, apart from the rows."""
    first = 1 if signature.batching else 0
    return all(not spec.optional and min(spec.shape[first:], default=0) >= 0 for spec in signature.inputs)


def parts_within(batch: list[Request], bytes_max: int) -> Iterator[list[Request]]:
    """Yield the requests of `batch`, in order, in parts of at most `bytes_max` bytes or of one request."""
    part: list[Request] = []
    free_bytes = bytes_max
    for request in batch:
        if part and request.permit_bytes > free_bytes:
            yield part
            part, free_bytes = [], bytes_max
        part.append(request)
        free_bytes -= request.permit_bytes
    yield part
