"""Keeps, for each pool, the prices at which its workers load a version, and updates them from the records that changed.

WorkerRecord, names of pinned models ─> WorkerViews.of ─> placement.views.WorkerView, as placement sees a worker
snapshot ─> PoolFleets.of ─(only workers whose record changed)─> PoolFleet: records, refusals and a placement Fleet
The controller and the simulation decide with the same Fleet. A pool in which nothing is cold costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from millstream.gateway.catalog.snapshot import ModelView, Snapshot
from millstream.services.model.manifest import Manifest
from millstream.services.placement.fleet import Fleet
from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import Footprint, PlacedInstance, WorkerView
from millstream.services.wire.records import InstanceRecord, RefusalRecord, State, WorkerRecord

#: A worker's used memory may change by this share of its budget before its price is made anew: what a process really
#: has changes a little with each heartbeat.
NOISE_SHARE = 1 / 256


VERSIONS_MAX = 20_000  # the one that was unloaded or changed first is forgotten


class _Known(NamedTuple):
    last_used: float
    usage: dict[str, float]


class UsageMemory:
    """The last known usage of versions, by content id."""

    def __init__(self, versions_max: int = VERSIONS_MAX) -> None:
        self._versions_max = versions_max
        self._read: dict[str, tuple[InstanceRecord, ...]] = {}  # by worker: what was read last
        self._known: dict[str, _Known] = {}

    def update(self, workers: Iterable[WorkerRecord]) -> None:
        """Apply the records of the live workers. Unchanged ones cost nothing."""
        read: dict[str, tuple[InstanceRecord, ...]] = {}
        for worker in workers:
            read[worker.id] = worker.instances
            before = self._read.get(worker.id)
            if before is worker.instances:
                continue
            known = set(map(id, before or ()))
            for one in worker.instances:
                if one.last_used and id(one) not in known:
                    self._remember(one)
        self._read = read

    def packed(self, content_id: str) -> dict[str, float]:
        """Return the packed usage of a version; empty if it is not known."""
        known = self._known.get(content_id)
        return {} if known is None else dict(known.usage)

    def last_used(self, content_id: str) -> float:
        """Return when a version was last used, in seconds on the Redis clock; 0: not known."""
        known = self._known.get(content_id)
        return 0.0 if known is None else known.last_used

    def _remember(self, one: InstanceRecord) -> None:
        known = self._known.pop(one.content_id, None)
        if known is None or known.last_used <= one.last_used:
            known = _Known(one.last_used, one.usage)
        self._known[one.content_id] = known
        if len(self._known) > self._versions_max:
            del self._known[next(iter(self._known))]


_BEING_LOADED = frozenset({State.LOADING, State.WARMING})


class _Placed(NamedTuple):
    """The instances of a worker, and what they were made from."""

    records: tuple[InstanceRecord, ...]
    pinned: frozenset[str]
    instances: dict[str, PlacedInstance]  # by content id
    of_record: dict[int, tuple[InstanceRecord, PlacedInstance]]  # by the id of the record


class WorkerViews:
    """Makes views of workers, and keeps those of instances that did not change.

    Args:
        footprint_of: returns what a version takes in a worker, measured or predicted; for versions that are being
            loaded, whose records do not say it yet.
    """

    def __init__(self, footprint_of: Callable[[Manifest, WorkerRecord], Footprint]) -> None:
        self._footprint_of = footprint_of
        self._placed: dict[str, _Placed] = {}  # by worker
        self._models: Mapping[str, ModelView] | None = None
        self._pinned: frozenset[str] = frozenset()  # models

    def pinned(self, models: Mapping[str, ModelView]) -> frozenset[str]:
        """Return the models that may not be unloaded; the same set if it has not changed."""
        if self._models is not models:
            self._models = models
            pinned = frozenset(
                name for name, one in models.items() if one.placement.pin or one.placement.instances_min > 0
            )
            self._pinned = self._pinned if pinned == self._pinned else pinned
        return self._pinned

    def of(self, worker: WorkerRecord, models: Mapping[str, ModelView]) -> WorkerView:
        """Return the view of a worker. Equal instances and pins give the same mapping of instances."""
        return WorkerView(
            worker.id,
            worker.pool,
            worker.budget_bytes,
            worker.used_bytes,
            worker.draining,
            self._instances(worker, models),
            worker.device_budget_bytes,
            worker.device_used_bytes,
            worker.room_bytes,
            worker.device_room_bytes,
        )

    def keep_only(self, workers: Iterable[WorkerRecord]) -> None:
        """Forget workers that are gone."""
        live = {worker.id for worker in workers}
        for gone in self._placed.keys() - live:
            del self._placed[gone]

    def _instances(self, worker: WorkerRecord, models: Mapping[str, ModelView]) -> dict[str, PlacedInstance]:
        known, pinned = self._placed.get(worker.id), self.pinned(models)
        if known is not None and known.records is worker.instances and known.pinned is pinned:
            return known.instances
        before = {} if known is None else known.of_record
        of_record: dict[int, tuple[InstanceRecord, PlacedInstance]] = {}
        for one in worker.instances:
            if one.state is State.FAILED:
                continue
            kept = before.get(id(one))  # its record is kept beside it, so that the id is not used again
            if kept is None or kept[1].pinned is not (one.model in pinned):
                expected = self._expected(one, worker, models) if one.state in _BEING_LOADED else None
                kept = (one, placed_instance(one, pinned=one.model in pinned, expected=expected))
            of_record[id(one)] = kept
        instances = {one.content_id: placed for one, placed in of_record.values()}
        self._placed[worker.id] = _Placed(worker.instances, pinned, instances, of_record)
        return instances

    def _expected(self, one: InstanceRecord, worker: WorkerRecord, models: Mapping[str, ModelView]) -> Footprint | None:
        model = models.get(one.model)
        version = None if model is None else model.versions.get(one.version)
        return None if version is None else self._footprint_of(version.manifest, worker)


def placed_instance(one: InstanceRecord, *, pinned: bool, expected: Footprint | None = None) -> PlacedInstance:
    """Return an instance as placement sees it.

    One that is being unloaded counts as in use: its bytes are not free. One that was never called may be unloaded
    however young it is: its load served no call.

    Args:
        one: its record.
        pinned: whether it must stay.
        expected: what it takes, as long as it has not measured that.
    """
    loaded_at = float("inf") if one.state in _BEING_LOADED else one.loaded_at if one.last_used else 0.0
    measured = Footprint(
        one.resident_bytes,
        one.peak_bytes,
        one.load_s,
        one.measured,
        one.device_resident_bytes,
        one.device_peak_bytes,
    )
    return PlacedInstance(
        one.content_id,
        measured if expected is None or measured.measured else expected,
        loaded_at,
        one.last_used,
        one.state is State.DRAINING,
        pinned,
        usage_of(one),
    )


def usage_of(one: InstanceRecord) -> Usage:
    """Return the usage that a worker published; that of an unknown release counts as none."""
    with suppress(ValueError):
        return Usage.unpack(one.usage)
    return NO_USAGE


class PoolFleet:
    """The live workers of a pool. Their prices are made when they are asked for.

    `records`: by worker. `refusals`: content id -> worker -> why it does not load that version.
    """

    def __init__(self, views: WorkerViews) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self.refusals: Mapping[str, Mapping[str, RefusalRecord]] = {}
        self._views = views
        self._fleet = Fleet()
        self._models: Mapping[str, ModelView] | None = None  # those of newer records; None: the prices are up to date
        self._pinned: frozenset[str] = frozenset()
        self._priced: dict[str, WorkerRecord] = {}  # the prices are those of these records
        self._known: dict[str, WorkerView] = {}  # the prices were made from these

    @property
    def fleet(self) -> Fleet:
        """The prices of the workers."""
        if self._models is not None:
            self._price(self._models)
            self._models = None
        return self._fleet

    def update(self, records: Sequence[WorkerRecord], models: Mapping[str, ModelView]) -> None:
        """Follow the records of the live workers: one whose instances, memory and state are as before keeps its price.

        `models`: of the repository.
        """
        self.records = {one.id: one for one in records}
        refusals: defaultdict[str, dict[str, RefusalRecord]] = defaultdict(dict)
        for record in records:
            for refusal in record.refusals:
                refusals[refusal.content_id][record.id] = refusal
        self.refusals, self._models = refusals, models

    def _price(self, models: Mapping[str, ModelView]) -> None:
        pinned = self._views.pinned(models)
        same_pins, self._pinned = pinned is self._pinned, pinned
        before, self._priced = self._priced, self.records
        for gone in before.keys() - self.records.keys():
            self._known.pop(gone, None)
            self._fleet.remove(gone)
        for record in self.records.values():
            known = self._known.get(record.id)
            if known is None or not same_pins or before.get(record.id) is not record:
                view = self._views.of(record, models)
                if known is None or _differ(known, view):
                    self._known[record.id] = view
                    self._fleet.update(view)

    def ordered(self, worker: str, content_id: str, need: Footprint, now: float) -> None:
        """Count a load that was ordered until the worker's next record, so that the next order goes elsewhere."""
        if len(self.records) > 1 and worker in self.fleet:
            self._fleet.order(worker, content_id, need, now)
            self._known.pop(worker, None)


class PoolFleets:
    """The fleets of all pools of one gateway. `footprint_of`: as of WorkerViews."""

    def __init__(self, footprint_of: Callable[[Manifest, WorkerRecord], Footprint]) -> None:
        self._views = WorkerViews(footprint_of)
        self._pools: dict[str, PoolFleet] = {}
        self._synced: dict[str, Snapshot] = {}  # by pool
        self._workers_of: dict[str, list[WorkerRecord]] = {}  # by pool, of the snapshot `_grouped`
        self._grouped: Snapshot | None = None

    def of(self, snapshot: Snapshot, pool: str) -> PoolFleet:
        """Return the workers of a pool as of a snapshot."""
        fleet = self._pools.setdefault(pool, PoolFleet(self._views))
        if self._synced.get(pool) is not snapshot:
            if self._grouped is not snapshot:
                self._grouped, self._workers_of = snapshot, {}
                for worker in snapshot.workers:
                    self._workers_of.setdefault(worker.pool, []).append(worker)
                self._views.keep_only(snapshot.workers)
            fleet.update(self._workers_of.get(pool, []), snapshot.models)
            self._synced[pool] = snapshot
        return fleet


def _differ(known: WorkerView, view: WorkerView) -> bool:
    return (
        known.instances is not view.instances
        or known.draining is not view.draining
        or known.budget_bytes != view.budget_bytes
        or abs(known.used_bytes - view.used_bytes) > NOISE_SHARE * view.budget_bytes
        or known.device_budget_bytes != view.device_budget_bytes
        or abs(known.device_used_bytes - view.device_used_bytes) > NOISE_SHARE * view.device_budget_bytes
    )
