"""The JSON documents about which worker holds which version, and about settings of endpoints. Pure.

Snapshot (repository, records of workers) + ClusterFacts (Redis) ─> placement ─> Placement, one page of models
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, Field

from millstream.gateway.admin.standby_reasons import WantedInstances, why_missing
from millstream.gateway.catalog.snapshot import ModelView, Snapshot, VersionView
from millstream.services.errors import Failure, invalid
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.model.names import check_name
from millstream.services.placement.views import Footprint
from millstream.services.queue.cluster_state import Leader
from millstream.services.wire.records import InstanceRecord, RefusalRecord, State, WorkerRecord

LIMIT_MAX = 1000  # models of one page
#: states of a version that no worker has ready, and that one may load
_TO_LOAD = frozenset({State.STANDBY, State.PENDING, State.LOADING, State.WARMING})


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What only Redis knows.

    Args:
        now: seconds on the Redis clock.
        leader: the controller that leads; None: none does.
        busy: (pool, content id) of lanes with batches that wait or run.
        loads: what loads of versions that are not ready take, by content id: the pool, and bytes and seconds there.
    """

    now: float
    leader: Leader | None = None
    busy: Collection[tuple[str, str]] = field(default_factory=frozenset)
    loads: Mapping[str, tuple[str, Footprint]] = field(default_factory=dict)


class ControllerInfo(BaseModel):
    """The controller that leads."""

    name: str
    token: int = Field(description="Fencing token: it grows with each new leader.")


class LoadRefusal(BaseModel):
    """A load that a worker was asked for and did not make, or that failed."""

    worker: str
    kind: str = Field(
        description="too_large, nothing_evictable, busy, too_slow, no_worker or failed; later releases may add others."
    )
    reason: str
    retry_after_s: float = Field(description="Seconds after which another try is worth it.")


class InstancePlacement(BaseModel):
    """A version in a worker."""

    model: str
    version: int
    state: State
    reason: str | None = Field(None, description="Why it failed.")
    size_bytes: int = Field(description="Measured memory that it keeps; 0 also while it is not loaded (`load_s`).")
    peak_bytes: int = Field(description="Further memory while it loads, warms up or runs its largest batch.")
    device_size_bytes: int = Field(description="Measured memory of the accelerator that it keeps; 0 on a CPU.")
    device_peak_bytes: int = Field(description="Further memory of the accelerator, likewise.")
    load_s: float = Field(description="Seconds that its load took; 0: it is not loaded yet.")
    loaded_age_s: float | None = Field(description="Seconds since it became ready.")
    last_used_age_s: float | None = Field(description="Seconds since its last request; null: it had none.")
    in_use: bool = Field(description="Whether batches of the version wait or run in this pool.")
    pinned: bool = Field(description="Whether it stays, also when memory is short.")
    why: str = Field(description='Why it was loaded: "a call", "its second instance", …')


class WorkerPlacement(BaseModel):
    """A worker, its memory, and the instances of the models on this page."""

    id: str
    pool: str
    device: str
    draining: bool = Field(description="It stops soon, and loads nothing.")
    budget_bytes: int | None = Field(description="Memory that its process may use; null: no limit.")
    used_bytes: int = Field(description="In use, promised to loads in progress, or not free yet after an unload.")
    free_bytes: int | None
    room_bytes: int | None = Field(description="What all instances together may take; null: no limit.")
    device_budget_bytes: int | None = Field(
        description="Memory of its accelerator that it may use; null: it has none, or no limit is known."
    )
    device_used_bytes: int = Field(description="Memory of its accelerator, likewise.")
    device_free_bytes: int | None
    device_room_bytes: int | None = Field(description="What all instances together may take of the accelerator.")
    instances_total: int = Field(description="Instances of all models, without those that failed.")
    instances: list[InstancePlacement]


class LoadPrediction(BaseModel):
    """What the load of a version takes in the first of its pools that has a worker."""

    pool: str
    size_bytes: int = Field(description="Memory that it keeps.")
    peak_bytes: int = Field(description="Further memory while it loads, warms up or runs its largest batch.")
    device_size_bytes: int = Field(description="Memory of the accelerator that it keeps; 0 on a CPU.")
    device_peak_bytes: int = Field(description="Further memory of the accelerator, likewise.")
    load_s: float = Field(description="Seconds of the load; 0: unknown.")
    measured: bool = Field(
        description="true: an earlier load took this; false: predicted from the size of its files and from what other "
        "versions took."
    )


class FailedInstance(BaseModel):
    """A worker that could not load a version."""

    worker: str
    reason: str


class VersionPlacement(BaseModel):
    """A version that serves: its settings, and which workers hold it."""

    model: str
    version: int
    active: bool
    state: State
    reason: str | None = None
    pools: list[str] = Field(description="Pools that may serve it, the preferred one first.")
    settings: EndpointPlacement = Field(description="Settings of its endpoint.")
    holders: list[str] = Field(description="Workers that have it, or load it.")
    failed: list[FailedInstance] = Field([], description="Workers in which its load failed.")
    standby: bool = Field(description="No worker has it; its first call makes one load it.")
    load: LoadPrediction | None = Field(
        None, description="What its load takes; null: it is ready or failed, or its pools have no worker."
    )
    refusals: list[LoadRefusal] = Field([], description="Why workers do not load it.")
    missing: str | None = Field(
        None,
        description="Why fewer instances are ready than the `instances_min` of its settings; null: there are enough.",
    )


class Placement(BaseModel):
    """Who holds what, and why: one page of models, and all workers."""

    leader: ControllerInfo | None = Field(description="null: no controller leads. Calls still load versions.")
    workers: list[WorkerPlacement]
    models: list[VersionPlacement]
    next_page_token: str | None = Field(None, description="For the next page; null: this is the last one.")


class EndpointSettings(BaseModel):
    """The settings of an endpoint."""

    model: str
    generation: int = Field(description="Counts the changes of the endpoint.")
    settings: EndpointPlacement
    warnings: list[str] = Field([], description="What keeps the settings from having an effect now.")


def placement(
    snapshot: Snapshot, facts: ClusterFacts, *, model: str | None, limit: int, page_token: str | None
) -> Placement:
    """Return a page of the placement. `model`: only this one. Raises Failure: NOT_FOUND, INVALID (no such page)."""
    names = _after(snapshot, model, page_token)
    shown = names[:limit]
    views = {name: snapshot.models[name] for name in shown}
    pinned = {
        view.manifest.content_id
        for one in views.values()
        if one.placement.pin
        for number, view in one.versions.items()
        if view.loaded and number == one.active
    }
    refusals = _refusals(snapshot.workers, facts.now)
    return Placement(
        leader=None if facts.leader is None else ControllerInfo(name=facts.leader.name, token=facts.leader.token),
        workers=[
            _worker(worker, views, pinned, facts)
            for worker in sorted(snapshot.workers, key=lambda worker: (worker.pool, worker.id))
        ],
        models=[
            _version(view, one, refusals.get(view.manifest.content_id, []), snapshot.workers, facts)
            for one in views.values()
            for view in one.versions.values()
            if view.loaded
        ],
        next_page_token=shown[-1] if len(names) > limit else None,
    )


def lanes_shown(snapshot: Snapshot, names: Iterable[str]) -> Mapping[str, list[str]]:
    """Return the content ids of these models that workers hold, by pool."""
    wanted = frozenset(names)
    found: dict[str, set[str]] = {}
    for worker in snapshot.workers:
        held = found.setdefault(worker.pool, set())
        held.update(one.content_id for one in worker.instances if one.model in wanted)
    return {pool: sorted(lanes) for pool, lanes in found.items()}


def loads_shown(
    snapshot: Snapshot, names: Iterable[str], footprint_of: Callable[[Manifest, WorkerRecord], Footprint]
) -> dict[str, tuple[str, Footprint]]:
    """Return what the loads of these models' versions take, by content id, of those that may be loaded.

    `footprint_of` reads files: call this off the event loop.
    """
    workers: dict[str, WorkerRecord] = {}
    for worker in snapshot.workers:
        workers.setdefault(worker.pool, worker)
    found: dict[str, tuple[str, Footprint]] = {}
    for name in names:
        for view in snapshot.models[name].versions.values():
            pool = next((pool for pool in view.pools if pool in workers), None)
            if pool is not None and view.state in _TO_LOAD:
                found[view.manifest.content_id] = pool, footprint_of(view.manifest, workers[pool])
    return found


def page_of(snapshot: Snapshot, model: str | None, limit: int, page_token: str | None) -> list[str]:
    """Return the names of the models of a page. Raises Failure: NOT_FOUND, INVALID."""
    return _after(snapshot, model, page_token)[:limit]


def _after(snapshot: Snapshot, model: str | None, page_token: str | None) -> list[str]:
    """Return the names of the models from this page on.

    The token is the last name of the page before: models that are registered or deleted meanwhile neither repeat nor
    hide others.
    """
    names = [snapshot.model(model).name] if model is not None else sorted(snapshot.models)
    if not page_token:
        return names
    try:
        check_name(page_token)
    except Failure:
        raise invalid("'page_token' is the 'next_page_token' of the last page") from None
    return names[bisect_right(names, page_token) :]


def _refusals(workers: Sequence[WorkerRecord], now: float) -> dict[str, list[LoadRefusal]]:
    """Return the refusals that still hold, by content id."""
    found: dict[str, list[LoadRefusal]] = {}
    for worker in workers:
        for one in worker.refusals:
            if one.until > now:
                found.setdefault(one.content_id, []).append(_refusal(worker, one, now))
    return found


def _refusal(worker: WorkerRecord, one: RefusalRecord, now: float) -> LoadRefusal:
    return LoadRefusal(worker=worker.id, kind=one.kind, reason=one.reason, retry_after_s=round(one.until - now, 1))


def _worker(
    worker: WorkerRecord, shown: Mapping[str, ModelView], pinned: Collection[str], facts: ClusterFacts
) -> WorkerPlacement:
    return WorkerPlacement(
        id=worker.id,
        pool=worker.pool,
        device=worker.device,
        draining=worker.draining,
        budget_bytes=worker.budget_bytes or None,
        used_bytes=worker.used_bytes,
        free_bytes=max(0, worker.budget_bytes - worker.used_bytes) if worker.budget_bytes else None,
        room_bytes=worker.room_bytes if worker.budget_bytes else None,
        device_budget_bytes=worker.device_budget_bytes or None,
        device_used_bytes=worker.device_used_bytes,
        device_free_bytes=max(0, worker.device_budget_bytes - worker.device_used_bytes)
        if worker.device_budget_bytes
        else None,
        device_room_bytes=worker.device_room_bytes if worker.device_budget_bytes else None,
        instances_total=sum(1 for one in worker.instances if one.state is not State.FAILED),
        instances=[
            _instance(one, worker.pool, pinned, facts)
            for one in sorted(worker.instances, key=lambda one: (one.model, one.version))
            if one.model in shown
        ],
    )


def _instance(one: InstanceRecord, pool: str, pinned: Collection[str], facts: ClusterFacts) -> InstancePlacement:
    return InstancePlacement(
        model=one.model,
        version=one.version,
        state=one.state,
        reason=one.reason,
        size_bytes=one.resident_bytes,
        peak_bytes=one.peak_bytes,
        device_size_bytes=one.device_resident_bytes,
        device_peak_bytes=one.device_peak_bytes,
        load_s=one.load_s,
        loaded_age_s=_age_s(one.loaded_at, facts.now),
        last_used_age_s=_age_s(one.last_used, facts.now),
        in_use=(pool, one.content_id) in facts.busy,
        pinned=one.content_id in pinned,
        why=one.why,
    )


def _age_s(instant: float, now: float) -> float | None:
    """Return how long ago an instant was; None for 0, which stands for none."""
    return round(max(0.0, now - instant), 1) if instant else None


def _version(
    view: VersionView,
    model: ModelView,
    refusals: list[LoadRefusal],
    workers: Sequence[WorkerRecord],
    facts: ClusterFacts,
) -> VersionPlacement:
    manifest = view.manifest
    load = facts.loads.get(manifest.content_id)
    wanted = model.placement.instances_min if manifest.version == model.active else 0
    refused = [one.reason for one in refusals]
    footprint = None if load is None else load[1]
    missing = why_missing(WantedInstances(view, wanted, workers, refused, footprint, facts.leader is not None))
    return VersionPlacement(
        model=manifest.model,
        version=manifest.version,
        active=manifest.version == model.active,
        state=view.state,
        reason=view.reason,
        pools=list(view.pools),
        settings=model.placement,
        holders=[at.worker.id for at in view.replicas if at.instance.state is not State.FAILED],
        failed=[
            FailedInstance(worker=at.worker.id, reason=at.instance.reason or "no reason is known")
            for at in view.replicas
            if at.instance.state is State.FAILED
        ],
        standby=view.state is State.STANDBY,
        load=None if load is None else _prediction(*load),
        refusals=refusals,
        missing=missing,
    )


def _prediction(pool: str, footprint: Footprint) -> LoadPrediction:
    return LoadPrediction(
        pool=pool,
        size_bytes=footprint.resident_bytes,
        peak_bytes=footprint.peak_bytes,
        device_size_bytes=footprint.device_resident_bytes,
        device_peak_bytes=footprint.device_peak_bytes,
        load_s=round(footprint.load_s, 3),
        measured=footprint.measured,
    )
