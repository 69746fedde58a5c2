"""Orders a worker to load the version that requests wait for, and watches the order until the version is ready.

request of a cold lane ─> check ─> decision ─> demand.lua: one order for a lane at a time, over all gateways
records of workers, every REPEAT_S ─> look again: order another worker, or refuse the waiting requests with the reason
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.snapshot import ModelView, ScaleView, Snapshot, VersionView
from millstream.gateway.placement.decision import (
    ColdVersion,
    Decision,
    OtherPools,
    Waiting,
    decide,
    failure_of,
    too_slow,
)
from millstream.gateway.placement.pool_fleets import PoolFleets, UsageMemory
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.placement.line import ready_in_s
from millstream.services.placement.views import Footprint, Refusal
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.waits import next_tick
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.wire.orders import Order
from millstream.services.wire.records import State, WorkerRecord

log = logging.getLogger("millstream.demands")

REPEAT_S = 1.0  # interval at which a demand is repeated: a Redis that lost its data has lost the order
#: No other worker is ordered for this time, or until the deadline of those that wait. When half of it is over, the
#: worker that has the load in its line is told how long those wait that wait now.
DEMAND_LIFE_S = 30.0
DEMAND_LIFE_S_MIN = 2.0  # at least this long, for a load that is about to begin
RETRIED_WITHIN_S = 10.0  # after the predicted end of a load, in which a refused request is expected to come again
#: A refusal is told to further requests for this long at most, before workers are looked at again.
REFUSAL_S_MAX = 0.25


class ColdLane(Protocol):
    """A lane without a ready instance."""

    manifest: Manifest

    @property
    def content_id(self) -> str: ...

    @property
    def link(self) -> ProducerLink: ...

    @property
    def pool(self) -> str: ...

    @property
    def ready(self) -> bool: ...

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or is in flight. Readiness probes do not count."""

    def refuse_cold(self, failure: Failure) -> None:
        """Fail the waiting requests that came while no instance was ready."""


class ColdLanes(Protocol):
    """The lanes of the gateway."""

    def loadable(self, content_id: str) -> ColdLane | None:
        """Return the lane of a version in the first of its pools that can load it."""

    def answered_elsewhere(self) -> Sequence[ColdLane]:
        """Return cold lanes of preferred pools, while another pool answered requests since the last call."""


class ColdRequest(Protocol):
    """The part of a request that counts here. Instants are seconds on the monotonic clock."""

    arrival: float
    deadline: float


@dataclass(slots=True, eq=False)
class _Demand:
    """A lane whose version is to be loaded."""

    lane: ColdLane
    since: float  # when its first request came (monotonic)
    active: bool = False  # it is loaded because it was activated, also without a request
    displaced: bool = False  # it is loaded because another pool answers its requests
    deadline: float = 0.0  # latest deadline of its requests (monotonic); infinity: one that is to come again
    ordered: str = ""  # worker
    kept_until: float = 0.0  # a request that was refused because the load takes too long may come again (monotonic)
    looked_at: Snapshot | None = None
    need: Footprint = field(default_factory=lambda: Footprint(0))
    loading_since: float = 0.0  # when a load was first seen (monotonic); 0: none is in progress
    ready_at: float = 0.0  # when it is loaded, by the prediction (monotonic); 0: unknown
    refusal: Refusal | None = None
    refusal_until: float = 0.0
    ordering: asyncio.Task[None] | None = None

    @property
    def why(self) -> str:
        """Why it is loaded, for people."""
        if self.lane.has_requests:
            return "a call"
        return "it was activated" if self.active else "another pool answers its calls" if self.displaced else "a call"


class Demands:
    """The demands of one gateway. Call it in the event loop.

    Args:
        footprint_of: returns what a version takes in a worker, measured or predicted.
        scale: what is known of pools without workers.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        lanes: ColdLanes,
        footprint_of: Callable[[Manifest, WorkerRecord], Footprint],
        scale: ScaleView,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.usage = UsageMemory()
        self._snapshot = snapshot
        self._lanes = lanes
        self._footprint_of = footprint_of
        self._scale = scale
        self._clock = clock
        self._fleets = PoolFleets(footprint_of)
        self._demands: dict[tuple[str, str], _Demand] = {}  # by pool and content id
        self._staffed_at: dict[str, float] = {}  # when each pool last had a worker
        self._other_pools = OtherPools(snapshot, self._fleets, footprint_of, self._is_ordered)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._repeat())]

    async def stop(self) -> None:
        orders = [demand.ordering for demand in self._demands.values() if demand.ordering is not None]
        await cancel_all([*self._tasks, *orders])

    @property
    def count(self) -> int:
        """How many lanes wait for a load."""
        return len(self._demands)

    def check(self, lane: ColdLane, request: ColdRequest) -> None:
        """Have the version of a request loaded, for which the request then waits.

        Raises:
            PassedOn: another pool is to load it. A request that comes again after that is not passed on.
            Failure: OVERLOADED (the load takes longer than the request may wait; it is loaded all the same),
                UNAVAILABLE (no worker can load it).
        """
        if (version := self._version(lane)) is not None and len(version.pools) > 1:
            self._other_pools.check(lane.pool, version, request)
        demand, now = self._demand(lane), self._clock()
        if demand.looked_at is not self._snapshot() or (demand.refusal is not None and now >= demand.refusal_until):
            self._look(demand)
        load_s = _remaining_s(demand, now)
        # What was predicted for a version that was never measured is no reason to refuse: it is tried.
        certain_s = load_s if demand.need.measured else load_s - demand.need.load_s
        late = now + certain_s > request.deadline
        if late:
            demand.kept_until = now + load_s + RETRIED_WITHIN_S
        demand.deadline = max(demand.deadline, demand.kept_until if late else request.deadline)
        if demand.refusal is not None:
            raise failure_of(lane.manifest.model, demand.refusal)
        if late:
            raise too_slow(lane.manifest.model, load_s)

    def _is_ordered(self, pool: str, content_id: str) -> bool:
        """Return whether a version is being loaded in a pool, or was ordered there."""
        demand = self._demands.get((pool, content_id))
        return demand is not None and bool(demand.ordered or demand.ordering is not None or demand.loading_since)

    def load_s(self, version: VersionView) -> float:
        """Return the predicted seconds until a version that is not ready is loaded; 0: unknown."""
        content_id = version.manifest.content_id
        worker = next((one for one in self._snapshot().workers if one.pool in version.pools), None)
        demands = (self._demands.get((pool, content_id)) for pool in version.pools)
        loading = next((one for one in demands if one is not None and one.loading_since), None)
        if loading is not None:
            return _remaining_s(loading, self._clock())
        return 0.0 if worker is None else self._footprint_of(version.manifest, worker).load_s

    def load(self, content_id: str, until: float) -> Refusal | None:
        """Have a version loaded without a request for it, until an instant (monotonic). Returns why it is refused."""
        lane = self._lanes.loadable(content_id)
        if lane is None or lane.ready:
            return None
        demand = self._demand(lane)
        demand.deadline, demand.kept_until = math.inf, max(demand.kept_until, until)
        if demand.looked_at is not self._snapshot():
            self._look(demand)
        if demand.refusal is not None:
            demand.kept_until = 0.0
        return demand.refusal

    async def load_and_wait(self, catalog: Catalog, manifest: Manifest, seconds_max: float) -> None:
        """Return when a worker has a version ready, for callers who ask for the load itself instead of an answer.

        Other versions may be unloaded for it.

        Raises:
            Failure: MEMORY (no worker has memory for it), MODEL (it failed), NOT_FOUND (it was removed), UNAVAILABLE.
        """
        until = self._clock() + seconds_max
        while True:
            view = catalog.snapshot.model(manifest.model).version(manifest.version)
            if view.ready:
                return
            if view.state is State.FAILED:
                raise Failure(Code.MODEL, f"model '{manifest.model}' cannot be loaded: {view.reason}")
            for content_id in [part.content_id for part in manifest.parts] or [manifest.content_id]:
                refusal = self.load(content_id, until)
                if refusal is not None:
                    raise failure_of(manifest.model, refusal)
            left_s = until - self._clock()
            if left_s <= 0:
                message = f"model '{manifest.model}' was not loaded within {seconds_max:g} s"
                raise Failure(Code.UNAVAILABLE, message, retry_after_s=1)
            await catalog.next_change(left_s)

    def wanted(self, lane: ColdLane) -> None:
        """Have a version loaded again whose last instance went while requests were on their way to it."""
        demand = self._demand(lane)
        demand.deadline = math.inf
        self._look(demand)

    def apply(self, snapshot: Snapshot, changed: Collection[str]) -> None:
        """Follow the workers' records: order other workers, refuse requests, demand versions that were activated."""
        self.usage.update(snapshot.workers)
        now = self._clock()
        self._staffed_at |= dict.fromkeys((worker.pool for worker in snapshot.workers), now)
        for name in changed:
            model = snapshot.models.get(name)
            version = None if model is None else _awaited(model)
            lane = None if version is None else self._lanes.loadable(version.manifest.content_id)
            if lane is not None:
                self._demand(lane).active = True
        for demand in list(self._demands.values()):
            if not self._ended(demand):
                self._look(demand)

    def _demand(self, lane: ColdLane) -> _Demand:
        key = (lane.pool, lane.content_id)
        demand = self._demands.get(key)
        if demand is None or demand.lane is not lane:
            demand = self._demands[key] = _Demand(lane, since=self._clock())
        return demand

    def _ended(self, demand: _Demand) -> bool:
        """Return whether nothing waits for the version any more; forget the demand then."""
        lane = demand.lane
        view = self._version(lane)
        if view is not None and not lane.ready:
            if demand.active:
                model = self._snapshot().models[lane.manifest.model]
                demand.active = _awaited(model) is view
            awaited = lane.has_requests or demand.kept_until > self._clock() or demand.active
            if awaited or demand.ordering is not None:
                return False
        if demand.ordering is None:
            self._demands.pop((lane.pool, lane.content_id), None)
        return True

    def _version(self, lane: ColdLane) -> VersionView | None:
        model = self._snapshot().models.get(lane.manifest.model)
        view = None if model is None else model.versions.get(lane.manifest.version)
        return view if view is not None and view.loaded and view.manifest.content_id == lane.content_id else None

    def _find_out(self, demand: _Demand) -> ColdVersion | None:
        """Return what is known about the version of a demand; None: it is gone."""
        snapshot, lane = self._snapshot(), demand.lane
        version = self._version(lane)
        if version is None:
            return None
        workers = self._fleets.of(snapshot, lane.pool)
        if workers.records:
            demand.need = self._footprint_of(lane.manifest, next(iter(workers.records.values())))
        now = self._clock()
        start_s = 0.0 if workers.records else self._scale.start_s(lane.pool)
        since = demand.since if start_s else self._staffed_at.setdefault(lane.pool, now)
        unstaffed_s = 0.0 if workers.records else now - since
        redis_s = lane.link.clock.now_ms() / 1000
        cold = ColdVersion(version, lane.pool, workers, demand.ordered, demand.need, redis_s, unstaffed_s, start_s)
        if not cold.loading:
            demand.loading_since = 0.0
        elif not demand.loading_since:
            demand.loading_since = self._clock()
        return cold

    def _look(self, demand: _Demand, *, again: bool = False) -> None:
        """Decide what to do for a lane, and do it. `again`: repeat an order that is not being carried out."""
        demand.looked_at = self._snapshot()
        demand.refusal = None
        cold = self._find_out(demand)
        if cold is None or demand.lane.ready:
            return
        decision = decide(cold)
        demand.ready_at = self._ready_at(demand, cold, decision)
        if isinstance(decision, Refusal):
            demand.refusal = decision
            demand.refusal_until = self._clock() + min(REFUSAL_S_MAX, decision.retry_after_s)
            demand.ordered = ""
            demand.lane.refuse_cold(failure_of(demand.lane.manifest.model, decision))
            return
        repeated = [demand.ordered] if again and demand.ordered and not cold.loading else []
        workers = repeated if isinstance(decision, Waiting) else list(decision)
        if workers and demand.ordering is None:
            demand.ordering = asyncio.create_task(self._order(demand, workers))

    def _ready_at(self, demand: _Demand, cold: ColdVersion, decision: Decision) -> float:
        """Return when the version is loaded, by the prediction (monotonic), behind what its worker loads before it."""
        load_s, now = cold.need.load_s, self._clock()
        if cold.start_s:  # the time of a start includes the worker's loads
            return max(now + load_s, demand.since + cold.start_s)
        if not load_s:
            return 0.0
        content_id = cold.version.manifest.content_id
        worker = cold.loads_at or demand.ordered
        if not isinstance(decision, Waiting | Refusal):
            worker = decision[0]
        record = cold.workers.records.get(worker)
        if record is None:
            return now + load_s
        if cold.loading and all(one.content_id != content_id for one in record.loads):  # the worker's release is old
            return demand.loading_since + load_s

        def load_s_of(other: str) -> float:
            instance = cold.workers.fleet[worker].instances.get(other)
            return instance.footprint.load_s if instance is not None and instance.footprint.measured else 0.0

        return now + ready_in_s(record.loads, load_s_of, content_id, load_s, cold.now)

    async def _order(self, demand: _Demand, workers: list[str]) -> None:
        lane = demand.lane
        try:
            await asyncio.sleep(0)  # requests of this turn of the event loop share the order and its deadline
            order = Order(
                do="load",
                content_id=lane.content_id,
                why=demand.why,
                evict=True,
                deadline=0.0 if demand.active else self._on_redis_clock(lane, demand.deadline),
                usage=self.usage.packed(lane.content_id),
            )
            life_s = max(DEMAND_LIFE_S_MIN, min(DEMAND_LIFE_S, demand.deadline - self._clock()))
            worker, now = await lane.link.demand(
                lane.content_id, round(life_s * 1000), order.model_dump_json().encode(), workers
            )
            demand.ordered = worker
            if now:
                workers_of = self._fleets.of(self._snapshot(), lane.pool)
                workers_of.ordered(worker, lane.content_id, demand.need, lane.link.clock.now_ms() / 1000)
                log.info("worker %s is to load %s", worker, lane.content_id)
        except Failure as failure:  # Redis is not reachable: repeated
            log.debug("no worker could be ordered to load %s: %s", lane.content_id, failure.message)
        except Exception:
            log.exception("no worker could be ordered to load %s", lane.content_id)
        finally:
            demand.ordering = None

    @staticmethod
    def _on_redis_clock(lane: ColdLane, deadline: float) -> float:
        """Return an instant of the monotonic clock as seconds on the Redis clock; 0 for infinity."""
        return 0.0 if math.isinf(deadline) else deadline + lane.link.clock.offset_ms / 1000

    async def _repeat(self) -> None:
        while True:
            await next_tick(REPEAT_S)
            try:
                self.repeat()
            except Exception:
                log.exception("demands could not be repeated")

    def repeat(self) -> None:
        """Order again what is not being loaded: the script tells if the order is still known.

        Versions in use whose preferred pool does not have them are loaded there, if that costs little.
        """
        for lane in self._lanes.answered_elsewhere():
            if not self._other_pools.is_worth_moving(lane.pool, lane.manifest, lane.link.clock.now_ms() / 1000):
                continue
            demand = self._demand(lane)
            demand.displaced, demand.deadline = True, math.inf
            demand.kept_until = max(demand.kept_until, self._clock() + RETRIED_WITHIN_S)
        for demand in list(self._demands.values()):
            if not self._ended(demand):
                self._look(demand, again=True)


def _remaining_s(demand: _Demand, now: float) -> float:
    """Return the seconds until the version is loaded, by the prediction; 0: unknown."""
    return max(0.0, demand.ready_at - now) if demand.ready_at else 0.0


def _awaited(model: ModelView) -> VersionView | None:
    """Return the version that was activated and is on standby or being loaded, while another one serves."""
    if model.active is None or model.serving == model.active:
        return None
    view = model.versions.get(model.active)
    return view if view is not None and view.on_demand and view.state is not State.FAILED else None
