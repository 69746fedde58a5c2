"""Workers as placement sees them, from the records that they publish. Pure.

WorkerRecord, endpoints that pin their versions ─> WorkerViews.of ─> placement.views.WorkerView
A worker whose instances did not change costs a dict lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from millstream.gateway.catalog.snapshot import ModelView
from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import Footprint, PlacedInstance, WorkerView
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

_BEING_LOADED = frozenset({State.LOADING, State.WARMING})


class _Placed(NamedTuple):
    """The instances of a worker, and what they were made from."""

    records: tuple[InstanceRecord, ...]
    models: Mapping[str, ModelView]
    instances: dict[str, PlacedInstance]  # by content id
    of_record: dict[int, tuple[InstanceRecord, PlacedInstance]]  # by the id of the record


class WorkerViews:
    """Makes views of workers, and keeps those of instances that did not change."""

    def __init__(self) -> None:
        self._placed: dict[str, _Placed] = {}  # by worker

    def of(self, workers: Iterable[WorkerRecord], models: Mapping[str, ModelView]) -> list[WorkerView]:
        """Return the views of `workers`. `models` say which instances are pinned."""
        return [
            WorkerView(
                worker.id,
                worker.pool,
                worker.budget_bytes,
                worker.used_bytes,
                worker.draining,
                self._instances(worker, models),
            )
            for worker in workers
        ]

    def keep_only(self, workers: Iterable[WorkerRecord]) -> None:
        """Forget workers that are gone."""
        live = {worker.id for worker in workers}
        for gone in self._placed.keys() - live:
            del self._placed[gone]

    def _instances(self, worker: WorkerRecord, models: Mapping[str, ModelView]) -> dict[str, PlacedInstance]:
        known = self._placed.get(worker.id)
        if known is not None and known.records is worker.instances and known.models is models:
            return known.instances
        before = {} if known is None else known.of_record
        of_record: dict[int, tuple[InstanceRecord, PlacedInstance]] = {}
        for one in worker.instances:
            if one.state is State.FAILED:
                continue
            pinned = _is_pinned(one, models)
            kept = before.get(id(one))  # its record is kept beside it, so that the id is not used again
            if kept is None or kept[1].pinned is not pinned:
                kept = (one, placed_instance(one, pinned=pinned))
            of_record[id(one)] = kept
        instances = {one.content_id: placed for one, placed in of_record.values()}
        self._placed[worker.id] = _Placed(worker.instances, models, instances, of_record)
        return instances


def placed_instance(one: InstanceRecord, *, pinned: bool) -> PlacedInstance:
    """Return an instance as placement sees it.

    One that is being unloaded counts as in use: its bytes are not free. One that was never called may be unloaded
    however young it is: its load served no call.
    """
    loaded_at = float("inf") if one.state in _BEING_LOADED else one.loaded_at if one.last_used else 0.0
    return PlacedInstance(
        one.content_id,
        Footprint(one.resident_bytes, one.peak_bytes, one.load_s, measured=one.resident_bytes > 0),
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


def _is_pinned(one: InstanceRecord, models: Mapping[str, ModelView]) -> bool:
    model = models.get(one.model)
    return model is not None and (model.placement.pin or model.placement.instances_min > 0)
