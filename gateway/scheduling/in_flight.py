"""One lane's batches that were put and have no reply yet, and the shared-memory slices that cool down after their use.

requests ─> put: pack, register, send ─> InFlightBatch ─> replied (frees its credit), or forget (no reply is expected)
"""

from __future__ import annotations

from collections import deque

from millstream.gateway.scheduling.lane_state import InFlightBatch, LaneState
from millstream.gateway.scheduling.request import Request
from millstream.services.process.waits import Spin
from millstream.services.queue.sharing import LONG_LIFE_MS_MAX, LONG_S, Share, long_life_ms
from millstream.services.wire.batch import ShmSlice

#: Batches of calls whose runs were short, before a lane's batches are dispatched directly, and may have a worker that
#: lanes called beside it need. Until then nothing but the warm-up says that its runs are short.
PROVEN_RUNS = 8
UNPROVEN_LIFE_MS = 1000  # a lane counts as one with long runs for this long after a batch before that
COST_MS_MIN = 0.05  # least cost of a batch in its lane's share of the workers: each run has overhead around it


class BusyPoll:
    """Keeps the event loop turning while the reply to a lone batch is due: waking a sleeping process takes longer."""

    __slots__ = ("_lane", "_polling", "_spin", "_until")

    def __init__(self, lane: LaneState) -> None:
        self._lane = lane
        self._spin = Spin(lane.context.spin_s_max)
        self._polling = False
        self._until = 0.0

    def begin(self, now: float) -> None:
        """Poll from now on, if the previous reply came within the limit."""
        limit_s = self._spin.seconds
        if limit_s:
            self._until = now + limit_s
            if not self._polling:
                self._polling = True
                self._lane.context.soon(self._turn)

    def record_wait(self, seconds: float, requests: int) -> None:
        """Record how long the reply to a batch of `requests` took."""
        self._spin.record_wait(seconds, requests)

    def _turn(self) -> None:
        self._polling = self._lane.in_flight > 0 and self._lane.clock() < self._until
        if self._polling:
            self._lane.context.soon(self._turn)


class InFlight:
    """The batches in flight of one lane."""

    __slots__ = ("_context", "_cooling", "_lane", "_long_until", "_poll", "_unproven")

    def __init__(self, lane: LaneState) -> None:
        self._lane = lane
        self._context = lane.context
        self._poll = BusyPoll(lane)
        self._unproven = PROVEN_RUNS  # batches of calls that are still to have short runs
        self._long_until = 0.0  # instant until which the lane counts as one with long runs
        self._cooling: deque[tuple[float, list[ShmSlice]]] = deque()  # (instant at which they are free, slices)

    def batches(self) -> list[InFlightBatch]:
        return [batch for batch in self._context.pending.values() if batch.lane is self._lane]

    def put(
        self, requests: list[Request], now: float, attempt: int = 1, losses: int = 0, *, deadlines: bool = True
    ) -> None:
        """Send requests as one batch.

        Args:
            requests: the requests, at least one.
            now: the current instant.
            attempt: 1; 2 and more after a worker died with these requests.
            losses: how often they, or their reply, were lost on the way before.
            deadlines: whether the worker gets their deadlines.
        """
        lane, context, policy = self._lane, self._context, self._lane.policy
        link = context.link
        rows = sum([request.rows for request in requests])
        streams = requests[0].window > 0
        run_s = 0.0 if streams else policy.run_s(rows)  # a stream leaves its worker to other runs
        name = link.new_name()
        redis_ms = now * 1000 + link.clock.offset_ms
        packed = lane.packer.pack(name, link.replies_key, requests, now, redis_ms, deadlines=deadlines)
        ends = [request.deadline for request in requests]
        earliest = min(ends)
        batch = InFlightBatch(name, lane, requests, packed.slices, attempt, now, run_s, losses, earliest, max(ends))
        context.pending[name] = batch
        lane.in_flight += 1
        policy.record_put(rows, run_s, now)
        counted = requests[0].counted
        if counted:
            context.contention.put(lane, now)
            context.used.add(lane)
        direct = context.direct
        # Readiness probes prove that the queue works. What was lost before takes the queue, which counts attempts.
        long_ms = 0 if streams else self._long_ms(run_s, now, counted=counted)
        takes_queue = (
            direct is None or not counted or attempt > 1 or losses or packed.blob or not deadlines or long_ms or streams
        )
        if takes_queue or not direct(batch, packed.entry, policy.depth):  # type: ignore[misc]
            deadline_ms = redis_ms + (earliest - now) * 1000
            share = Share(max(run_s * 1000, COST_MS_MIN), rows / policy.batch_rows, counted, long_ms)
            link.put(lane.content_id, name, packed.entry, packed.blob, deadline_ms, attempt, share)
        if packed.segment_bytes:
            lane.metrics.segment_bytes.add(packed.segment_bytes)
        if len(context.pending) == 1:
            self._poll.begin(now)

    def _long_ms(self, run_s: float, now: float, *, counted: bool) -> int:
        """Return how long a batch makes its lane count as one with long runs in the pool, in ms; 0: not at all."""
        if run_s >= LONG_S:
            return long_life_ms(run_s)
        if now < self._long_until:
            return int((self._long_until - now) * 1000)
        return UNPROVEN_LIFE_MS if self._unproven and counted else 0

    def ran(self, seconds: float, now: float) -> None:
        """Record how long the run of a call's batch took."""
        if seconds >= LONG_S:
            self._long_until = max(self._long_until, now + long_life_ms(seconds) / 1000)
        elif self._unproven:
            self._unproven -= 1

    def yielded(self, now: float) -> None:
        """Record that a run left its worker to others: no batch of the lane may have their last worker directly."""
        self._long_until = now + LONG_LIFE_MS_MAX / 1000

    def retry(self, requests: list[Request], attempt: int, losses: int = 0, *, deadlines: bool = True) -> None:
        """Send requests again that were in flight before. Arguments as in `put`."""
        self.put(requests, self._lane.clock(), attempt, losses, deadlines=deadlines)

    @property
    def connected(self) -> bool:
        """Whether Redis can be reached."""
        return self._context.link.connected

    def outlive(self, request: Request, batch: InFlightBatch | None = None) -> None:
        """Count the run of a request, whose call ends, as a call of its key until its batch is no longer in flight.

        Else a key could have any number of runs at once, by calls that it gives up.

        Args:
            request: in flight, not done.
            batch: has the request; None: it is not known.
        """
        account = request.account
        if account is None:
            return
        batch = batch or next((one for one in self.batches() if request in one.requests), None)
        if batch is not None:
            account.outlive()
            batch.outlived = [*(batch.outlived or ()), account]

    def leave(self, batch: InFlightBatch, now: float) -> None:
        """Tell the worker of a batch that all its callers have gone."""
        batch.left = True
        self._context.link.leave(batch.name, batch.latest - now)

    def take_back(self) -> None:
        """Have the calls' batches returned that no worker has yet: the version is refused (Recovery.put_again)."""
        for batch in self.batches():
            if batch.direct is None and batch.requests[0].counted:
                self._context.link.withdraw(self._lane.content_id, batch.name, refused=True)

    def replied(self, batch: InFlightBatch) -> float:
        """Record the reply to a batch, which frees its credit. Returns the current instant."""
        self._remove(batch)
        self._lane.replied_at = now = self._lane.clock()
        self._lane.policy.estimator.replied(batch.run_s, now)
        self._poll.record_wait(now - batch.put_at, len(batch.requests))
        return now

    def forget(self, batch: InFlightBatch, *, untouched: bool = False) -> None:
        """Withdraw a batch and free its credit: no reply is expected.

        `untouched`: no worker has its shared memory, or will have it.
        """
        self._remove(batch)
        self._lane.policy.estimator.removed(batch.run_s)
        if batch.direct is None:
            self._context.link.withdraw(self._lane.content_id, batch.name)
        if untouched:
            self._lane.packer.free(batch.slices)
        elif batch.slices:
            self._cool_down(batch.slices)

    def _remove(self, batch: InFlightBatch) -> None:
        del self._context.pending[batch.name]
        self._lane.in_flight -= 1
        if batch.direct is not None:
            batch.direct.outstanding.pop(batch.name, None)
        if batch.left:
            self._context.link.drop_left(batch.name)
        if batch.outlived is not None:
            for account in batch.outlived:
                account.leave()

    def free_slices(self, batch: InFlightBatch, attempt: int) -> None:
        """Give back the shared memory of a batch that was answered at this `attempt`.

        After a second attempt the slices cool down first: the worker of the first may be frozen, and write later.
        """
        if attempt > 1:
            self._cool_down(batch.slices)
        else:
            self._lane.packer.free(batch.slices)

    def _cool_down(self, slices: list[ShmSlice]) -> None:
        self._cooling.append((self._lane.clock() + self._context.rest_s, slices))
        self._context.timed.add(self._lane)

    def tick(self, now: float) -> bool:
        """Give back slices that have cooled down. Returns whether others are still cooling down."""
        while self._cooling and self._cooling[0][0] <= now:
            self._lane.packer.free(self._cooling.popleft()[1])
        return bool(self._cooling)
