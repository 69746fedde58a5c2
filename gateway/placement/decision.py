"""Decides what happens to the requests of a version that no worker of its pool serves. Pure.

records of workers, the order given so far ─> decide ─> WAIT, workers to order, best first, or a Refusal
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from millstream.gateway.catalog.snapshot import Replica, VersionView
from millstream.gateway.placement.pool_fleets import PoolFleet
from millstream.services.placement.views import Footprint, Refusal, RefusalKind
from millstream.services.wire.records import InstanceRecord, State

FAILED_RETRY_S = 10.0  # hint to clients of a version that workers load again only when an operator asks for it
RETRY_S_MIN = 1.0  # hint to clients of a version that a worker loads again now
NO_WORKER_S = 30.0  # requests wait this long for a pool's next worker: its last one may be restarted
STARTS_MAX = 2  # requests wait this many predicted starts longer for a worker that is started for them
ASKED_MAX = 8  # workers that an order names: it goes to the first of them that is alive
NO_WORKER_RETRY_S = 5.0  # hint to clients of a version whose pools have no worker
#: which refusal is reported if several workers refuse: the one that a retry can most likely mend
_RETRY_FIRST = (
    RefusalKind.TOO_SLOW,
    RefusalKind.NOTHING_EVICTABLE,
    RefusalKind.FAILED,
    RefusalKind.TOO_LARGE,
    RefusalKind.NO_WORKER,
)


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
