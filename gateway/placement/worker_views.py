"""Workers as placement sees them, from the records that they publish. Pure.

WorkerRecord, names of pinned models ─> WorkerViews.of ─> placement.views.WorkerView
A worker whose instances did not change costs a dict lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from millstream.gateway.catalog.snapshot import ModelView
from millstream.services.model.manifest import Manifest
from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import Footprint, PlacedInstance, WorkerView
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

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

    def of(self, worker: WorkerRecord, models: Mapping[str, ModelView], pinned: frozenset[str]) -> WorkerView:
        """Return the view of a worker. Equal instances and the same `pinned` give the same mapping of instances.

        Args:
            worker: its record.
            models: the models of the repository.
            pinned: names of the models whose instances stay.
        """
        return WorkerView(
            worker.id,
            worker.pool,
            worker.budget_bytes,
            worker.used_bytes,
            worker.draining,
            self._instances(worker, models, pinned),
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

    def _instances(
        self, worker: WorkerRecord, models: Mapping[str, ModelView], pinned: frozenset[str]
    ) -> dict[str, PlacedInstance]:
        known = self._placed.get(worker.id)
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
