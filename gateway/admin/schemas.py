"""What the admin API says about models, pools and workers, made from the gateway's views. Pure.

Manifest, views and records are how the parts talk among themselves; these documents are what callers may rely on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import BaseModel, Field

from millstream.gateway.catalog.snapshot import ModelView, Replica, Snapshot, VersionView
from millstream.services.errors import not_found
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import TensorSpec
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord


class Tensor(BaseModel):
    """A named input or output. `shape`: -1 is a variable dimension; the first is the rows when the version batches."""

    name: str
    datatype: str
    shape: list[int]

    @classmethod
    def of(cls, spec: TensorSpec) -> Self:
        return cls(name=spec.name, datatype=spec.datatype, shape=list(spec.shape))


class VersionInstance(BaseModel):
    """A version loaded, or on its way, in one worker."""

    worker: str
    state: State
    reason: str | None = None
    profile: dict[int, float] = Field({}, description="Rows of a run -> measured seconds.")
    size_bytes: int

    @classmethod
    def of(cls, placed: Replica) -> Self:
        one = placed.instance
        return cls(
            worker=placed.worker.id,
            state=one.state,
            reason=one.reason,
            profile=dict(one.profile),
            size_bytes=one.size_bytes,
        )


class Version(BaseModel):
    """A version of a model. While its upload is in progress only the name, the number and the state are known."""

    model: str
    version: int | None = Field(description="null: an upload whose number is given when it is published.")
    state: State
    reason: str | None = Field(None, description="Why the state is failed.")
    digest: str | None = Field(None, description="sha256 of the uploaded bytes, in hex.")
    size_bytes: int | None = None
    created: float | None = Field(None, description="Seconds since the epoch.")
    pool: str | None = None
    active: bool = Field(False, description="The version asked for; `serving` of the model is the one that answers.")
    batching: bool | None = None
    batching_decided: Literal["proven", "requested", "off"] | None = Field(
        None, description="Whether independent rows are proven, batching was asked for without a proof, or is off."
    )
    batching_reason: str | None = Field(None, description="Why it is off, or not proven.")
    rows_max: int | None = None
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    notes: list[str] = Field([], description="What the check found worth saying.")
    instances: list[VersionInstance] = []

    @classmethod
    def of(cls, view: VersionView, *, active: bool) -> Self:
        manifest = view.manifest
        off = view.verdict.batching_off
        return cls(
            model=manifest.model,
            version=manifest.version,
            state=view.state,
            reason=view.reason,
            digest=manifest.digest,
            size_bytes=sum(file.size_bytes for file in manifest.files),
            created=manifest.created,
            pool=manifest.config.pool,
            active=active,
            batching=manifest.signature.batching and not off,
            batching_decided="off" if off else manifest.batching.decided,
            batching_reason=off or manifest.batching.reason or None,
            rows_max=manifest.config.rows_max,
            inputs=[Tensor.of(spec) for spec in manifest.signature.inputs],
            outputs=[Tensor.of(spec) for spec in manifest.signature.outputs],
            notes=list(manifest.notes),
            instances=[VersionInstance.of(placed) for placed in view.placed],
        )


class Model(BaseModel):
    """A model and its versions, ascending; uploads in progress come among them."""

    name: str
    active: int | None = Field(description="The version asked for.")
    serving: int | None = Field(description="The version that answers requests that name none.")
    source: str | None = Field(None, description="The folder of models that it is served from in place.")
    reason: str | None = Field(None, description="Why its last load failed.")
    unloaded: bool = Field(False, description="It does not answer until it is loaded.")
    versions: list[Version]


class Models(BaseModel):
    """All models, by name."""

    models: list[Model]


class Pool(BaseModel):
    """Workers that serve the same versions. `workers` 0: versions ask for the pool and nothing serves it."""

    name: str
    workers: int
    devices: list[str]
    backends: list[str]
    versions: int = Field(description="Published versions that ask for this pool.")
    instances: int
    instances_ready: int


class Pools(BaseModel):
    """All pools that have a worker or that a version asks for."""

    pools: list[Pool]


class WorkerInstance(BaseModel):
    """A version in a worker. `rows_max`: the largest run it takes."""

    model: str
    version: int
    state: State
    reason: str | None = None
    profile: dict[int, float] = Field({}, description="Rows of a run -> measured seconds.")
    rows_max: int
    size_bytes: int

    @classmethod
    def of(cls, record: InstanceRecord) -> Self:
        return cls.model_validate(record, from_attributes=True)


class WorkerInfo(BaseModel):
    """A worker process that has sent a heartbeat of late."""

    id: str
    pool: str
    device: str
    backend: str
    pid: int
    host: str
    started: float = Field(description="Seconds since the epoch.")
    heartbeat_age_s: float
    instances: list[WorkerInstance]


class WorkerList(BaseModel):
    """All live workers, by pool and name."""

    workers: list[WorkerInfo]


def published(manifest: Manifest, snapshot: Snapshot) -> Version:
    """The document of a version that was just published, whether or not the snapshot has heard of it."""
    model = snapshot.models.get(manifest.model)
    view = model.versions.get(manifest.version) if model else None
    if view is None or view.manifest.content_id != manifest.content_id:
        view = VersionView(manifest=manifest, state=State.PENDING, reason=None, placed=())
    return Version.of(view, active=model is not None and model.active == manifest.version)


def models(snapshot: Snapshot, uploads: Mapping[tuple[str, int | None], State]) -> Models:
    """Every model that has a version, an endpoint or an upload in progress."""
    names = set(snapshot.models) | {model for model, _ in uploads}
    return Models(models=[_model(name, snapshot.models.get(name), uploads) for name in sorted(names)])


def model(name: str, snapshot: Snapshot, uploads: Mapping[tuple[str, int | None], State]) -> Model:
    """Raises Failure(NOT_FOUND)."""
    if not any(uploading == name for uploading, _ in uploads):
        snapshot.model(name)
    return _model(name, snapshot.models.get(name), uploads)


def version(name: str, number: int, snapshot: Snapshot, uploads: Mapping[tuple[str, int | None], State]) -> Version:
    """Raises Failure(NOT_FOUND)."""
    for one in model(name, snapshot, uploads).versions:
        if one.version == number:
            return one
    raise not_found(f"Request for unknown model: '{name}' version {number} is not found")


def _model(name: str, view: ModelView | None, uploads: Mapping[tuple[str, int | None], State]) -> Model:
    known = view.versions if view else {}
    active = view.active if view else None
    versions = [Version.of(one, active=number == active) for number, one in known.items()]
    versions += [
        Version(model=name, version=number, state=state)
        for (uploading, number), state in uploads.items()
        if uploading == name and number not in known
    ]
    # an upload without a number gets one above all others
    versions.sort(key=lambda one: (one.version is None, one.version or 0))
    return Model(
        name=name,
        active=active,
        serving=view.serving if view else None,
        source=view.source if view else None,
        reason=(view.failure or None) if view else None,
        unloaded=view.unloaded if view else False,
        versions=versions,
    )


def pools(snapshot: Snapshot) -> Pools:
    """The pools of the live workers and of the published versions."""
    wanted: dict[str, int] = {}
    for one in snapshot.models.values():
        for view in one.versions.values():
            wanted[view.manifest.config.pool] = wanted.get(view.manifest.config.pool, 0) + 1
    names = sorted(set(wanted) | {worker.pool for worker in snapshot.workers})
    return Pools(
        pools=[
            _pool(name, wanted.get(name, 0), [worker for worker in snapshot.workers if worker.pool == name])
            for name in names
        ]
    )


def _pool(name: str, versions: int, members: Sequence[WorkerRecord]) -> Pool:
    states = [instance.state for worker in members for instance in worker.instances]
    return Pool(
        name=name,
        workers=len(members),
        devices=sorted({worker.device for worker in members}),
        backends=sorted({worker.backend for worker in members}),
        versions=versions,
        instances=len(states),
        instances_ready=states.count(State.READY),
    )


def workers(snapshot: Snapshot, now: float) -> WorkerList:
    """`now`: seconds since the epoch. A clock may be set meanwhile: an age is at least 0."""
    return WorkerList(
        workers=[
            WorkerInfo(
                id=worker.id,
                pool=worker.pool,
                device=worker.device,
                backend=worker.backend,
                pid=worker.pid,
                host=worker.host,
                started=worker.started,
                heartbeat_age_s=max(0.0, now - worker.heartbeat),
                instances=[WorkerInstance.of(instance) for instance in worker.instances],
            )
            for worker in sorted(snapshot.workers, key=lambda one: (one.pool, one.id))
        ]
    )
