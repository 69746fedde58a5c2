"""The JSON documents about which worker holds which version, and about settings of endpoints. Pure.

Snapshot (repository, records of workers) + ClusterFacts (Redis) ─> placement ─> Placement, one page of models
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pydantic import BaseModel, Field

from millstream.gateway.admin.standby_reasons import why_missing
from millstream.gateway.catalog.snapshot import ModelView, Snapshot, VersionView
from millstream.services.errors import Failure, invalid
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.model.names import check_name
from millstream.services.placement.views import Footprint
from millstream.services.queue.cluster_state import Leader
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

LIMIT_MAX = 1000  # models of one page
#: states of a version that no worker has ready, and that one may load
_TO_LOAD = frozenset({State.STANDBY, State.PENDING, State.LOADING, State.WARMING})


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What only Redis, and the profiles of earlier loads, know."""

    now: float  # on the Redis clock
    loads: Mapping[str, tuple[str, Footprint]]  # what loads of versions that are not ready take: `loads_shown`
    leader: Leader | None = None  # the controller that leads
    busy: Collection[tuple[str, str]] = field(default_factory=frozenset)  # lanes with batches: (pool, content id)


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


class _Memory(BaseModel):
    """What an instance takes."""

    size_bytes: int = Field(
        validation_alias="resident_bytes",
        description="Memory that it keeps, as measured; 0 also while it is not loaded (`load_s`).",
    )
    peak_bytes: int = Field(description="Further memory while it loads, warms up or runs its largest batch.")
    device_size_bytes: int = Field(
        validation_alias="device_resident_bytes", description="Memory of the accelerator that it keeps; 0 on a CPU."
    )
    device_peak_bytes: int = Field(description="Further memory of the accelerator, likewise.")
    load_s: float = Field(description="Seconds that its load takes; 0: unknown, or it is not loaded yet.")


class InstancePlacement(_Memory):
    """A version in a worker."""

    model: str
    version: int
    state: State
    reason: str | None = Field(None, description="Why it failed.")
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


class LoadPrediction(_Memory):
    """What the load of a version takes in the first of its pools that has a worker."""

    pool: str
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


def placement(snapshot: Snapshot, facts: ClusterFacts, names: Sequence[str], next_page_token: str | None) -> Placement:
    """Return a page of the placement: the models that `page_of` names."""
    views = {name: snapshot.models[name] for name in names}
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
        next_page_token=next_page_token,
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


def page_of(snapshot: Snapshot, model: str | None, limit: int, page_token: str | None) -> tuple[list[str], str | None]:
    """Return the names of the models of a page, and the token of the next one. Raises Failure: NOT_FOUND, INVALID.

    The token is the last name of the page before: models that are registered or deleted meanwhile neither repeat nor
    hide others.
    """
    names = [snapshot.model(model).name] if model is not None else sorted(snapshot.models)
    if page_token:
        try:
            check_name(page_token)
        except Failure:
            raise invalid("'page_token' is the 'next_page_token' of the last page") from None
        names = names[bisect_right(names, page_token) :]
    shown = names[:limit]
    return shown, shown[-1] if len(names) > limit else None


def _refusals(workers: Sequence[WorkerRecord], now: float) -> dict[str, list[LoadRefusal]]:
    """Return the refusals that still hold, by content id."""
    found: dict[str, list[LoadRefusal]] = {}
    for worker in workers:
        for one in worker.refusals:
            if one.until > now:
                wait_s = round(one.until - now, 1)
                refusal = LoadRefusal(worker=worker.id, kind=one.kind, reason=one.reason, retry_after_s=wait_s)
                found.setdefault(one.content_id, []).append(refusal)
    return found


def _worker(
    worker: WorkerRecord, shown: Mapping[str, ModelView], pinned: Collection[str], facts: ClusterFacts
) -> WorkerPlacement:
    instances = [
        _instance(one, worker.pool, pinned, facts)
        for one in sorted(worker.instances, key=lambda one: (one.model, one.version))
        if one.model in shown
    ]
    total = sum(1 for one in worker.instances if one.state is not State.FAILED)
    memory = _room("", worker.budget_bytes, worker.used_bytes, worker.room_bytes) | _room(
        "device_", worker.device_budget_bytes, worker.device_used_bytes, worker.device_room_bytes
    )
    fields = dict(worker) | memory | {"instances": instances, "instances_total": total}
    return WorkerPlacement.model_validate(fields)


def _room(kind: str, budget: int, used: int, room: int) -> dict[str, int | None]:
    """Return the fields about one kind of memory, null where there is no limit."""
    free = max(0, budget - used)
    found = {"budget_bytes": budget, "free_bytes": free, "room_bytes": room}
    return {f"{kind}{name}": size_bytes if budget else None for name, size_bytes in found.items()}


def _instance(one: InstanceRecord, pool: str, pinned: Collection[str], facts: ClusterFacts) -> InstancePlacement:
    at = {
        "loaded_age_s": _age_s(one.loaded_at, facts.now),
        "last_used_age_s": _age_s(one.last_used, facts.now),
        "in_use": (pool, one.content_id) in facts.busy,
        "pinned": one.content_id in pinned,
    }
    return InstancePlacement.model_validate(dict(one) | at)


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
    pool, footprint = facts.loads.get(manifest.content_id, ("", None))
    wanted = model.placement.instances_min if manifest.version == model.active else 0
    refused = [one.reason for one in refusals]
    missing = why_missing(view, wanted, workers, refused, footprint, leads=facts.leader is not None)
    load = None
    if footprint is not None:
        load = LoadPrediction.model_validate(asdict(footprint) | {"pool": pool, "load_s": round(footprint.load_s, 3)})
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
        load=load,
        refusals=refusals,
        missing=missing,
    )
