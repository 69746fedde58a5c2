"""Decides what happens to the requests of a version that no worker of its pool serves. Pure.

request of a cold lane ─> OtherPools.check ─> its pool loads the version │ PassedOn: a later pool loads it, or has room
records of workers, the order given so far ─> decide ─> WAIT, workers to order, best first, or a Refusal
Refusal ─> failure_of, too_slow ─> what the caller gets
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from millstream.gateway.catalog.snapshot import Replica, Snapshot, VersionView
from millstream.gateway.placement.pool_fleets import PoolFleet, PoolFleets
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.placement.fleet import PoolOffer, is_worth_moving, without_unloading
from millstream.services.placement.views import Footprint, Refusal, RefusalKind
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

FAILED_RETRY_S = 10.0  # hint to clients of a version that workers load again only when an operator asks for it
RETRY_S_MIN = 1.0  # hint to clients of a version that a worker loads again now
NO_WORKER_S = 30.0  # requests wait this long for a pool's next worker: its last one may be restarted
STARTS_MAX = 2  # requests wait this many predicted starts longer for a worker that is started for them
ASKED_MAX = 8  # workers that an order names: it goes to the first of them that is alive
NO_WORKER_RETRY_S = 5.0  # hint to clients of a version whose pools have no worker
#: If several workers refuse, the refusal is reported that a retry can most likely mend.
_RETRY_FIRST = (
    RefusalKind.TOO_SLOW,
    RefusalKind.NOTHING_EVICTABLE,
    RefusalKind.FAILED,
    RefusalKind.TOO_LARGE,
    RefusalKind.NO_WORKER,
)


_WITHOUT_MEMORY = frozenset({RefusalKind.TOO_LARGE, RefusalKind.NOTHING_EVICTABLE})


class Waiting(Enum):
    """Nothing is to be done now."""

    WAIT = "wait"


WAIT = Waiting.WAIT
Decision = Waiting | Sequence[str] | Refusal


@dataclass(frozen=True, slots=True)
class ColdVersion:
    """A version that no worker of a pool serves, and what is known about it.

    Args:
        version: the version.
        pool: the pool.
        workers: the live workers of the pool, with their prices.
        ordered: the worker that was ordered to load it; "": none, or it is to be asked again.
        need: what the version takes on those workers.
        now: the current instant, in seconds on the Redis clock.
        unstaffed_s: seconds since the pool had a worker, or since its first request if one is started then; 0: it has.
        start_s: seconds until the pool has a worker, which is started for a request; 0: none is.
    """

    version: VersionView
    pool: str
    workers: PoolFleet
    ordered: str
    need: Footprint
    now: float
    unstaffed_s: float = 0.0
    start_s: float = 0.0

    @property
    def replicas(self) -> list[Replica]:
        return [at for at in self.version.replicas if at.worker.pool == self.pool]

    @property
    def loads_at(self) -> str:
        """The worker that is loading it; "": none. One that will load it later gives no reason, and takes orders."""
        return next((at.worker.id for at in self.replicas if _loads(at.instance)), "")

    @property
    def loading(self) -> bool:
        """Whether a worker is loading it."""
        return bool(self.loads_at)


def decide(cold: ColdVersion) -> Decision:
    """Return what to do."""
    verdict = cold.version.verdict
    workers = cold.workers.records
    failed = verdict.failed_on({worker.kind for worker in workers.values()}) if verdict.loads else ""
    if failed:
        return Refusal(RefusalKind.FAILED, failed, FAILED_RETRY_S)
    if not workers:
        return _without_workers(cold)
    if cold.loading or cold.version.state is State.PENDING:
        return WAIT
    refusals = _refusals(cold)
    if cold.ordered and cold.ordered not in refusals and cold.ordered in workers:
        return WAIT
    return _choose(cold, refusals)


def _choose(cold: ColdVersion, refusals: Mapping[str, Refusal]) -> Decision:
    """Return the workers to order. One that is alone in its pool is ordered whatever its price."""
    workers = cold.workers.records
    if len(workers) == 1 and not refusals:
        [(worker, record)] = workers.items()
        return WAIT if record.draining else [worker]
    content_id = cold.version.manifest.content_id
    fleet = cold.workers.fleet
    chosen = fleet.choose(content_id, cold.need, cold.now, ASKED_MAX, refusals)
    if not isinstance(chosen, Refusal):
        return chosen
    # By its record, no worker has room. The record is some time old, and only the worker knows what is in use: the
    # worker decides, and publishes a refusal that holds for some time.
    ranked = fleet.ranked(content_id, ASKED_MAX, refusals)
    if ranked:
        return ranked
    if not refusals:
        return WAIT  # a worker may start before the deadline
    return min(refusals.values(), key=lambda refusal: _RETRY_FIRST.index(refusal.kind))


def _without_workers(cold: ColdVersion) -> Decision:
    if cold.unstaffed_s < NO_WORKER_S + STARTS_MAX * cold.start_s:
        return WAIT  # a worker may start before the deadline
    reason = f"pool {cold.pool} has had no worker for {cold.unstaffed_s:.0f} s"
    return Refusal(RefusalKind.NO_WORKER, reason, NO_WORKER_RETRY_S)


def _loads(instance: InstanceRecord) -> bool:
    return instance.state is State.WARMING or (instance.state is State.LOADING and bool(instance.why))


def _refusals(cold: ColdVersion) -> Mapping[str, Refusal]:
    """Return the workers that do not load the version now, and why."""
    refusals: dict[str, Refusal] = {}
    for at in cold.replicas:
        if at.instance.state is State.FAILED:
            reason = at.instance.reason or "it failed to load"
            refusals[at.worker.id] = Refusal(RefusalKind.FAILED, reason, _retry_after_s(at.instance, cold.now))
    for worker, one in cold.workers.refusals.get(cold.version.manifest.content_id, {}).items():
        if one.until > cold.now and one.kind != RefusalKind.BUSY:  # it was no call that was refused
            refusals[worker] = Refusal(_kind(one.kind), one.reason, one.until - cold.now)
    return refusals


def _retry_after_s(failed: InstanceRecord, now: float) -> float:
    """Return the seconds until a worker loads a version again by itself; FAILED_RETRY_S if it does not say so."""
    return max(RETRY_S_MIN, failed.retry_at - now) if failed.retry_at else FAILED_RETRY_S


def _kind(name: str) -> RefusalKind:
    """Return the kind of a refusal; one that this release does not know counts as a failure."""
    try:
        return RefusalKind(name)
    except ValueError:
        return RefusalKind.FAILED


class OtherPools:
    """The pools of one gateway. Call it in the event loop.

    `is_ordered`: whether a version (its content id) is being loaded in a pool, or was ordered there.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        fleets: PoolFleets,
        footprint_of: Callable[[Manifest, WorkerRecord], Footprint],
        is_ordered: Callable[[str, str], bool],
    ) -> None:
        self._snapshot = snapshot
        self._fleets = fleets
        self._footprint_of = footprint_of
        self._is_ordered = is_ordered
        self._request = 0  # id of the request that was passed on last
        self._passed_by: set[str] = set()  # pools that passed it on

    def check(self, pool: str, version: VersionView, request: object) -> None:
        """Let a pool load a version for a request, unless a later pool loads it, or could with nothing unloaded.

        Raises PassedOn. A request that no other pool took comes again, and is then not passed on by the same pool.
        """
        content_id = version.manifest.content_id
        if self._request == id(request) and pool in self._passed_by:
            return
        if pool not in version.pools or self._is_ordered(pool, content_id):
            return
        other = self._other(pool, version)
        if other and other != pool:
            if self._request != id(request):
                self._request, self._passed_by = id(request), set()
            self._passed_by.add(pool)
            raise PassedOn(pool, other)

    def _other(self, pool: str, version: VersionView) -> str:
        """Return the pool that is to load a version, `pool` or a later one; "": all would have to unload for it."""
        content_id = version.manifest.content_id
        later = version.pools[version.pools.index(pool) + 1 :]
        ordered = next((one for one in later if self._is_ordered(one, content_id)), "")
        if ordered:
            return ordered
        failed = {at.worker.pool for at in version.replicas}
        asked = [one for one in (pool, *later) if one not in failed]
        offers = [offer for one in asked if (offer := self._offer(one, version.manifest)) is not None]
        return without_unloading(offers)

    def is_worth_moving(self, pool: str, manifest: Manifest, now: float) -> bool:
        """Return whether a preferred pool is to load a version that another pool answers. `now`: on the Redis clock."""
        offer = self._offer(pool, manifest)
        return offer is not None and is_worth_moving(offer.fleet, manifest.content_id, offer.need, now)

    def _offer(self, pool: str, manifest: Manifest) -> PoolOffer | None:
        """Return what a pool has to offer for a version; None: it has no worker, or one has refused the version."""
        workers = self._fleets.of(self._snapshot(), pool)
        if not workers.records or manifest.content_id in workers.refusals:
            return None
        need = self._footprint_of(manifest, next(iter(workers.records.values())))
        return PoolOffer(pool, workers.fleet, need)


class PassedOn(Failure):
    """A pool would have to unload models for a version, and another pool need not: that one is to load it."""

    def __init__(self, pool: str, other: str) -> None:
        self.other = other
        super().__init__(Code.MEMORY, f"pool {pool} has no memory free, and pool {other} has or loads it")


def failure_of(model: str, refusal: Refusal) -> Failure:
    """Return the failure of an inference: 503 with the reason; 429 if the load only takes too long."""
    if refusal.kind is RefusalKind.TOO_SLOW:
        return too_slow(model, refusal.retry_after_s)
    code = Code.MEMORY if refusal.kind in _WITHOUT_MEMORY else Code.UNAVAILABLE
    message = f"model '{model}' cannot be loaded: {refusal.reason}"
    return Failure(code, message, retry_after_s=refusal.retry_after_s or None)


def too_slow(model: str, load_s: float) -> Failure:
    """Return the failure of a request whose deadline comes before the end of the load."""
    return Failure(
        Code.OVERLOADED,
        f"model '{model}' is loading, about {about_s(load_s)}, longer than the request may wait",
        retry_after_s=load_s,
    )


def about_s(seconds: float) -> str:
    """Return a predicted duration for people: "4 s"."""
    return f"{seconds:.1f} s" if seconds < 1 else f"{math.ceil(seconds)} s"
