"""Turns what workers publish and the repository holds into what the planner decides on. Pure.

WorkerRecords + StoredModels + footprints ─> Survey.take ─> WorkerViews, ServedVersions

Survey remembers what records alone do not say: how often a version was called since the look before, and the usage of
versions that no worker holds any longer.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from millstream.plugins.fleet.planned import ServedVersion, Unmeasured
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.placement.pools import PoolTraits, kinds_of, learn, pools_of
from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import Footprint, PlacedInstance, WorkerView
from millstream.services.repository.footprints import Measured, file_bytes
from millstream.services.repository.stored_models import StoredModel
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

#: versions whose usage is remembered after their unload; beyond, the one that was called longest ago is forgotten
REMEMBERED_MAX = 20_000
RATE_S = 20.0  # time constant of the mean of calls a second
RATE_S_MIN = 5.0  # over which the mean of a version is formed at least that was just called first
#: Instances count as in use for this time after their last request: records show requests up to 5 s late.
USED_S = 6.0
RATE_MIN = 1e-4  # less counts as none

#: (manifest, kind of instances) -> what an instance takes, measured or predicted
FootprintOf = Callable[[Manifest, str], Footprint]
#: (manifest, kind of instances) -> what was written: a measurement, or what a load found too little; None: nothing
WrittenOf = Callable[[Manifest, str], Measured | None]

_HOLDS = frozenset({State.READY, State.LOADING, State.WARMING})


class Habits(NamedTuple):
    """When a version is called."""

    usage: Usage
    last_used: float


class Findings(NamedTuple):
    """What one round decides on, and the counts for metrics."""

    workers: tuple[WorkerView, ...]
    versions: tuple[ServedVersion, ...]
    instances_ready: int
    instances_wanted: int  # by instances_min
    instances_missing: int  # of those that are wanted

    def pool_of(self, worker: str) -> str:
        """Return the pool of a worker."""
        return next(view.pool for view in self.workers if view.id == worker)


class Survey:
    """Remembers usage between rounds.

    Args:
        footprint_of: returns what an instance of a version takes (repository.footprints).
        written_of: returns what workers wrote about that.
    """

    def __init__(self, footprint_of: FootprintOf, written_of: WrittenOf = lambda _, __: None) -> None:
        self._footprint_of = footprint_of
        self._written_of = written_of
        self._habits: OrderedDict[str, Habits] = OrderedDict()
        self._usages = Usages()
        self._rates = Rates()
        self._pools: Mapping[str, PoolTraits] = {}

    def habits(self, content_id: str) -> Habits:
        """Return the usage of a version, loaded or not."""
        return self._habits.get(content_id, _NONE)

    def clock_was_set(self, step_s: float) -> None:
        """Move what is remembered by a step of the Redis clock."""
        for content_id, known in self._habits.items():
            if known.last_used:
                self._habits[content_id] = known._replace(last_used=known.last_used + step_s)
        self._rates.clock_was_set(step_s)

    def take(self, workers: Sequence[WorkerRecord], models: Mapping[str, StoredModel], now: float) -> Findings:
        """Return what the planner takes. `now`: on the Redis clock."""
        self._pools = learn(self._pools, workers)
        self._usages.update(workers)
        self._remember(workers)
        self._rates.update(workers, now)
        kinds = {worker.pool: worker.kind for worker in workers}
        ready = Counter(one.content_id for worker in workers for one in worker.instances if one.state is State.READY)
        versions: list[ServedVersion] = []
        pinned: set[str] = set()
        expected: dict[str, Mapping[str, Footprint]] = {}
        for model in models.values():
            for number, (manifest, verdict) in model.versions.items():
                if manifest.parts or not model.endpoint.serves(number):  # no worker loads what a gateway composes
                    continue
                settings = model.endpoint.placement_of(number)
                pools = pools_of(manifest, settings, self._pools)
                if verdict.failed_on(kinds_of(pools, self._pools)):
                    continue
                footprints = {
                    pool: self._footprint_of(manifest, kinds[pool])
                    for pool in pools
                    if pool in kinds and not verdict.on(kinds[pool]).failed
                }
                expected[manifest.content_id] = footprints
                unmeasured = {
                    pool: self._unmeasured(manifest, kinds[pool])
                    for pool, footprint in footprints.items()
                    if not footprint.measured
                }
                versions.append(self._version(manifest.content_id, settings, footprints, unmeasured))
                if settings.pin:
                    pinned.add(manifest.content_id)
        return Findings(
            tuple(view_of(worker, self._usages.of(worker), pinned, expected, now) for worker in workers),
            tuple(versions),
            sum(ready.values()),
            sum(version.instances_min for version in versions),
            sum(max(0, version.instances_min - ready[version.content_id]) for version in versions),
        )

    def _unmeasured(self, manifest: Manifest, kind: str) -> Unmeasured:
        written = self._written_of(manifest, kind)
        return Unmeasured(file_bytes(manifest), None if written is None else written.footprint)

    def _version(
        self,
        content_id: str,
        settings: EndpointPlacement,
        footprints: Mapping[str, Footprint],
        unmeasured: Mapping[str, Unmeasured],
    ) -> ServedVersion:
        usage, last_used = self.habits(content_id)
        calls_per_s, run_s = self._rates.of(content_id)
        return ServedVersion(
            content_id,
            tuple(footprints),
            footprints,
            instances_min=settings.instances_min,
            instances_max=settings.instances_max,
            idle_s=settings.idle_s,
            pin=settings.pin,
            calls_per_s=calls_per_s,
            run_s=run_s,
            usage=usage,
            last_used=last_used,
            unmeasured=unmeasured,
        )

    def _remember(self, workers: Sequence[WorkerRecord]) -> None:
        for worker in workers:
            usages = self._usages.of(worker)
            for instance in worker.instances:
                known = self._habits.get(instance.content_id, _NONE)
                if instance.last_used > known.last_used:
                    self._habits[instance.content_id] = Habits(usages[instance.content_id], instance.last_used)
                    self._habits.move_to_end(instance.content_id)
        while len(self._habits) > REMEMBERED_MAX:
            self._habits.popitem(last=False)


_NONE = Habits(NO_USAGE, 0.0)
_UNKNOWN = Footprint(0)


class Usages:
    """The usages that instances publish. A record that did not change is the same object as before, and read once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], dict[str, tuple[InstanceRecord, Usage]]] = {}  # pool, worker -> content id
        self._of: dict[tuple[str, str], dict[str, Usage]] = {}

    def of(self, worker: WorkerRecord) -> Mapping[str, Usage]:
        """Return content id -> usage for the instances of one of the workers."""
        return self._of[worker.pool, worker.id]

    def update(self, workers: Sequence[WorkerRecord]) -> None:
        """Read the usages that changed."""
        read: dict[tuple[str, str], dict[str, tuple[InstanceRecord, Usage]]] = {}
        for worker in workers:
            before = self._read.get((worker.pool, worker.id), {})
            read[worker.pool, worker.id] = {
                one.content_id: known
                if (known := before.get(one.content_id)) is not None and known[0] is one
                else (one, usage_of(one))
                for one in worker.instances
            }
        self._read = read
        self._of = {worker: {content_id: usage for content_id, (_, usage) in of.items()} for worker, of in read.items()}


class _Counted(NamedTuple):
    runs: int
    busy_s: float


class _Rate(NamedTuple):
    """A mean that began at 0."""

    calls_per_s: float
    run_s: float
    since: float


class Rates:
    """Runs a second of each version and the seconds that one keeps a worker busy, from the counts of instances.

    For the planner they are calls: it multiplies the two. Requests that share a run are one.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Counted] = {}  # worker, content id
        self._rates: dict[str, _Rate] = {}
        self._at = 0.0

    def of(self, content_id: str) -> tuple[float, float]:
        """Return calls a second in the last half minute, and seconds of one call; 0: not known."""
        rate = self._rates.get(content_id)
        if rate is None:
            return 0.0, 0.0
        weight = 1 - math.exp(-max(RATE_S_MIN, self._at - rate.since) / RATE_S)  # of what was counted so far
        return rate.calls_per_s / weight, rate.run_s

    def clock_was_set(self, step_s: float) -> None:
        """Move all instants by a step of the clock."""
        self._at += step_s
        self._rates = {name: rate._replace(since=rate.since + step_s) for name, rate in self._rates.items()}

    def update(self, workers: Sequence[WorkerRecord], now: float) -> None:
        """Add what was counted since the last update."""
        elapsed_s, self._at = now - self._at, now
        counts: dict[tuple[str, str], _Counted] = {}
        new: dict[str, _Counted] = {}
        for worker in workers:
            for one in worker.instances:
                if not one.runs:
                    continue
                counts[worker.id, one.content_id] = _Counted(one.runs, one.busy_s)
                before = self._counts.get((worker.id, one.content_id), _Counted(0, 0.0))
                if one.runs < before.runs:  # it was loaded again
                    before = _Counted(0, 0.0)
                known = new.get(one.content_id, _Counted(0, 0.0))
                new[one.content_id] = _Counted(
                    known.runs + one.runs - before.runs, known.busy_s + one.busy_s - before.busy_s
                )
        first, self._counts = not self._counts, counts
        if first or elapsed_s <= 0:
            return
        weight = 1 - math.exp(-elapsed_s / RATE_S)
        rates: dict[str, _Rate] = {}
        for content_id in self._rates.keys() | new.keys():
            runs, busy_s = new.get(content_id, _Counted(0, 0.0))
            mean = self._rates.get(content_id, _Rate(0.0, 0.0, now - elapsed_s))
            calls_per_s = mean.calls_per_s + weight * (runs / elapsed_s - mean.calls_per_s)
            if calls_per_s >= RATE_MIN:
                rates[content_id] = _Rate(calls_per_s, busy_s / runs if runs else mean.run_s, mean.since)
        self._rates = rates


def usage_of(instance: InstanceRecord) -> Usage:
    """Return the usage that an instance publishes; none if this release cannot read it."""
    try:
        return Usage.unpack(instance.usage)
    except ValueError:
        return NO_USAGE


def view_of(
    worker: WorkerRecord,
    usages: Mapping[str, Usage],
    pinned: Collection[str],
    expected: Mapping[str, Mapping[str, Footprint]],
    now: float,
) -> WorkerView:
    """Return a worker as placement sees it.

    Args:
        worker: its record.
        usages: content id -> usage of its instances.
        pinned: content ids that stay loaded.
        expected: content id -> pool -> what an instance takes, for those that have not measured it yet.
        now: the current instant on the Redis clock.
    """
    return WorkerView(
        worker.id,
        worker.pool,
        worker.budget_bytes,
        worker.used_bytes,
        device_budget_bytes=worker.device_budget_bytes,
        device_used_bytes=worker.device_used_bytes,
        room_bytes=worker.room_bytes,
        device_room_bytes=worker.device_room_bytes,
        draining=worker.draining,
        instances={
            one.content_id: PlacedInstance(
                one.content_id,
                Footprint(
                    one.resident_bytes,
                    one.peak_bytes,
                    one.load_s,
                    measured=True,
                    device_resident_bytes=one.device_resident_bytes,
                    device_peak_bytes=one.device_peak_bytes,
                )
                if one.measured
                else expected.get(one.content_id, {}).get(worker.pool, _UNKNOWN),
                one.loaded_at if one.state is State.READY else math.inf,
                one.last_used,
                in_use=now - one.last_used < USED_S,
                pinned=one.content_id in pinned,
                usage=usages[one.content_id],
            )
            for one in worker.instances
            if one.state in _HOLDS
        },
    )
