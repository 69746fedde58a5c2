"""Keeps, for each pool, the prices at which its workers load a version, and updates them from the records that changed.

snapshot ─> PoolFleets.of ─(only workers whose record changed)─> PoolFleet: records, refusals and a placement Fleet
The controller and the simulation decide with the same Fleet. A pool in which nothing is cold costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from millstream.gateway.catalog.snapshot import ModelView, Snapshot
from millstream.gateway.placement.worker_views import WorkerViews
from millstream.services.model.manifest import Manifest
from millstream.services.placement.fleet import Fleet
from millstream.services.placement.views import Footprint, WorkerView
from millstream.services.wire.records import RefusalRecord, WorkerRecord

#: A worker's used memory may change by this share of its budget before its price is made anew: what a process really
#: has changes a little with each heartbeat.
NOISE_SHARE = 1 / 256


@dataclass(slots=True)
class PoolFleet:
    """The live workers of a pool.

    Args:
        records: by worker.
        refusals: content id -> worker -> why it does not load that version.
        fleet: their prices.
    """

    records: dict[str, WorkerRecord] = field(default_factory=dict)
    refusals: Mapping[str, Mapping[str, RefusalRecord]] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=Fleet)
    _pinned: frozenset[str] = frozenset()
    _views: dict[str, WorkerView] = field(default_factory=dict)  # that the fleet's prices were made from

    def update(
        self, records: Sequence[WorkerRecord], view_of: Callable[[WorkerRecord], WorkerView], pinned: frozenset[str]
    ) -> None:
        """Follow the records: a worker whose instances, memory and state are as before keeps its price.

        Args:
            records: of the live workers.
            view_of: makes a view of a worker.
            pinned: names of the models whose instances stay.
        """
        same_pins, self._pinned = pinned is self._pinned, pinned
        before, self.records = self.records, {one.id: one for one in records}
        for gone in before.keys() - self.records.keys():
            self._views.pop(gone, None)
            self.fleet.remove(gone)
        refusals: defaultdict[str, dict[str, RefusalRecord]] = defaultdict(dict)
        for record in records:
            known = self._views.get(record.id)
            if known is None or not same_pins or before.get(record.id) is not record:
                view = view_of(record)
                if known is None or _differ(known, view):
                    self._views[record.id] = view
                    self.fleet.update(view)
            for refusal in record.refusals:
                refusals[refusal.content_id][record.id] = refusal
        self.refusals = refusals

    def ordered(self, worker: str, content_id: str, need: Footprint, now: float) -> None:
        """Count a load that was ordered until the worker's next record, so that the next order goes elsewhere."""
        if worker in self.fleet:
            self.fleet.order(worker, content_id, need, now)
            self._views.pop(worker, None)


class PoolFleets:
    """The fleets of all pools of one gateway.

    Args:
        footprint_of: returns what a version takes in a worker; for versions that are being loaded.
    """

    def __init__(self, footprint_of: Callable[[Manifest, WorkerRecord], Footprint]) -> None:
        self._views = WorkerViews(footprint_of)
        self._pools: dict[str, PoolFleet] = {}
        self._synced: dict[str, Snapshot] = {}  # by pool
        self._workers_of: dict[str, list[WorkerRecord]] = {}  # by pool, of the snapshot `_grouped`
        self._grouped: Snapshot | None = None
        self._models: Mapping[str, ModelView] | None = None
        self._pinned: frozenset[str] = frozenset()  # models

    def of(self, snapshot: Snapshot, pool: str) -> PoolFleet:
        """Return the workers of a pool as of a snapshot."""
        fleet = self._pools.setdefault(pool, PoolFleet())
        if self._synced.get(pool) is not snapshot:
            self._group(snapshot)
            models, pinned = snapshot.models, self._pinned
            fleet.update(self._workers_of.get(pool, []), lambda worker: self._views.of(worker, models, pinned), pinned)
            self._synced[pool] = snapshot
        return fleet

    def _group(self, snapshot: Snapshot) -> None:
        """Sort the workers of a snapshot by pool, and find the models that may not be unloaded."""
        if self._grouped is snapshot:
            return
        self._grouped, self._workers_of = snapshot, {}
        for worker in snapshot.workers:
            self._workers_of.setdefault(worker.pool, []).append(worker)
        self._views.keep_only(snapshot.workers)
        if self._models is not snapshot.models:
            self._models = snapshot.models
            pinned = frozenset(
                name for name, one in snapshot.models.items() if one.placement.pin or one.placement.instances_min > 0
            )
            self._pinned = self._pinned if pinned == self._pinned else pinned


def _differ(known: WorkerView, view: WorkerView) -> bool:
    return (
        known.instances is not view.instances
        or known.draining is not view.draining
        or known.budget_bytes != view.budget_bytes
        or abs(known.used_bytes - view.used_bytes) > NOISE_SHARE * view.budget_bytes
        or known.device_budget_bytes != view.device_budget_bytes
        or abs(known.device_used_bytes - view.device_used_bytes) > NOISE_SHARE * view.device_budget_bytes
    )
