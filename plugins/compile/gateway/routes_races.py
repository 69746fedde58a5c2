"""The admin API for races: ask for one, see it, cancel it, take its verdict back, upload samples."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Self

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from millstream.gateway.admin.schemas_models import RaceSummary
from millstream.gateway.catalog.snapshot import VersionView
from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.http.body import read_body, read_document
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import BINARY, OCTETS, json_body, request_body
from millstream.plugins.compile.race.report import Gate
from millstream.plugins.compile.stored.job import (
    Job,
    Jobs,
    RaceOptions,
    RacePast,
    RaceState,
    RaceUndone,
    environment,
    has_worker,
    new_job,
    write_uploaded,
)
from millstream.plugins.compile.stored.selection import Selections, undo
from millstream.plugins.compile.targets import target_of
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import Code, Failure, invalid, not_found
from millstream.services.model.manifest import Manifest
from millstream.services.model.samples import read_samples, stored
from millstream.services.placement.pools import pools_text, unknown_pool
from millstream.services.process.audit import audit, audited
from millstream.services.process.threads import in_storage_thread
from millstream.services.repository.documents import content_digest
from millstream.services.wire.records import State, WorkerRecord

router = APIRouter(prefix="/admin/v1")

SAMPLES_BYTES_MAX = 64 << 20  # of an upload of samples
LOAD_S_MAX = 60.0  # for which the load of a version on standby is asked for
LOAD_WAIT_S = 2.0  # that the answer waits for this load; later, the race waits for it
_NOT_COMPILED = {
    "simulated": "a simulated version has no model to compile",
    "triton": "another server runs it, which compiles it itself",
}
_LOADS = frozenset({State.PENDING, State.STANDBY, State.LOADING, State.WARMING})
_BEING_LOADED = "the version is being loaded"
_PATH = "/models/{name}/versions/{version}/race"
_Change = Callable[[Deps, VersionView, str | None], Job]
_Pool = Annotated[str | None, Query(description="Of which pool; default: the race that was asked for last.")]


class GateLimits(Gate):
    """What the outputs of a candidate must agree in with those of the baseline."""

    model_config = ConfigDict(extra="forbid")


class RaceRequest(RaceOptions):
    """What a race is asked for. Every field has a default."""

    model_config = ConfigDict(extra="forbid")

    gate: GateLimits = GateLimits()
    pool: str | None = Field(None, description="Pool whose worker runs it; null: the first one that has it ready.")


class RaceDocument(BaseModel):
    """A race of a version on a kind of device, and its report."""

    model: str
    version: int
    pool: str
    kind: str = Field(description='Backend and device of the workers that it holds for, like "onnxruntime.cpu".')
    device: str = Field(description="Id of the device and of the versions of the libraries there.")
    state: RaceState
    why: str = Field(description="Why it waits, was queued again, or ended as it did.")
    requested_at: float = Field(description="Seconds since the epoch.")
    began_at: float | None = None
    ended_at: float | None = None
    worker: str | None = Field(None, description="That runs it.")
    tries: int = Field(description="How often a worker began it.")
    options: RaceOptions
    progress: dict[str, Any] = Field({}, description="The last event while it runs: stage, candidate, ratios so far.")
    baseline: str | None = Field(None, description="What served before: backend, threads and datatype.")
    winner: str | None = Field(None, description="Candidate that won; null: nothing changes, or there is no verdict.")
    ratio: float = Field(1.0, description="Times as fast as the baseline, weighted by batch size.")
    table: dict[int, str] = Field({}, description='Rows of a run -> candidate, or "baseline".')
    rows: list[dict[str, Any]] = Field([], description="All candidates with verdict, ratios and accuracy.")
    report: dict[str, Any] | None = Field(None, description="The whole report; null: there is no verdict.")
    serving: bool = Field(False, description="Whether workers of this kind follow the verdict.")
    undone: RaceUndone | None = None
    past: list[RacePast] = []

    @classmethod
    def of(cls, job: Job, *, serving: bool) -> Self:
        fields = job.model_dump(mode="json")
        report = fields["report"] or {}
        fields |= {name: report[name] for name in ("baseline", "table", "rows") if name in report}
        fields |= {name: fields[name] or None for name in ("began_at", "ended_at", "worker")}
        fields["progress"] = job.progress.model_dump(exclude_defaults=True)
        return cls(**fields, winner=job.winner, ratio=job.ratio, serving=serving)


class SamplesStored(BaseModel):
    """Samples that later races of a version use."""

    arrays: dict[str, list[int]] = Field(description="Name -> shape.")


@router.post(
    _PATH,
    status_code=202,
    summary="Compile a version in every way, measure, and serve the winner",
    description="A worker that has the version ready runs the race at low priority while it serves. A race "
    "that waits or runs with the same options is returned as it is; one that ended begins anew.",
    responses=documented(400, 404, 409, 413, 503),
    openapi_extra=json_body(RaceRequest, required=False, example={"targets": ["openvino"]}),
)
async def request_race(name: str, version: int, request: Request, deps: DepsOf) -> RaceDocument:
    asked = await read_document(request, RaceRequest)
    for target in asked.targets:
        target_of(target)
    with audited("race", name, version=version):
        view = _raced(deps, name, version)
        worker, ready = await _worker(deps, view, asked.pool)
        race = await in_storage_thread(_request, deps, view, (worker, ready), asked)
    audit("race requested", name, version=version, pool=race.pool)
    return await asyncio.to_thread(_document, deps, view.manifest, race)


@router.get(_PATH, summary="The race of a version, and its report", responses=documented(400, 404))
async def get_race(name: str, version: int, deps: DepsOf, pool: _Pool = None) -> RaceDocument:
    view = _published(deps, name, version)
    race = await asyncio.to_thread(_find, deps, view, pool)
    return await asyncio.to_thread(_document, deps, view.manifest, race)


@router.delete(
    _PATH,
    summary="Cancel a race",
    description="A worker ends it within a second. A verdict that was reached is not changed by it: undo that.",
    responses=documented(400, 404, 409, 503, 507),
)
async def cancel_race(name: str, version: int, deps: DepsOf, pool: _Pool = None) -> RaceDocument:
    return await _changed(deps, _published(deps, name, version), pool, _cancel, ("cancel race", "race cancelled"))


@router.post(
    f"{_PATH}/undo",
    summary="Serve the version's own file again",
    description="Workers swap back without losing a request. The report stays.",
    responses=documented(400, 404, 409, 503, 507),
)
async def undo_race(name: str, version: int, deps: DepsOf, pool: _Pool = None) -> RaceDocument:
    return await _changed(deps, _published(deps, name, version), pool, _undo, ("undo race", "race undone"))


@router.put(
    f"{_PATH}/samples",
    summary="Upload samples for the races of a version",
    description="An .npz file with an array `input/NAME` for each input, and `output/NAME` where outputs are known; "
    "the first dimension is rows. It replaces earlier samples, is readable by the server's user alone, and is deleted "
    "with the version.",
    responses=documented(400, 404, 413, 503, 507),
    openapi_extra=request_body({OCTETS: BINARY}, description="An .npz file of numpy."),
)
async def put_samples(name: str, version: int, request: Request, deps: DepsOf) -> SamplesStored:
    view = _published(deps, name, version)
    body = await read_body(request, SAMPLES_BYTES_MAX)
    with audited("upload samples", name, version=version):
        shapes = await in_storage_thread(_store, deps, view.manifest, body)
    audit("samples uploaded", name, version=version)
    return SamplesStored(arrays=shapes)


def _store(deps: Deps, manifest: Manifest, body: bytes) -> dict[str, list[int]]:
    arrays = stored(read_samples(io.BytesIO(body), manifest.signature))
    write_uploaded(deps.repository, manifest, arrays)
    return {name: list(array.shape) for name, array in arrays.items()}


def _published(deps: Deps, name: str, version: int) -> VersionView:
    return deps.catalog.snapshot.model(name).published(version)


def _raced(deps: Deps, name: str, version: int) -> VersionView:
    """Return a version that can be raced. Raises Failure(INVALID, NOT_FOUND)."""
    view = _published(deps, name, version)
    if view.manifest.parts:
        raise invalid(f"version {version} of '{name}' cannot be raced: it is a graph; race the models of its steps")
    if why := _NOT_COMPILED.get(view.manifest.source_format):
        raise invalid(f"version {version} of '{name}' cannot be raced: {why}")
    return view


async def _worker(deps: Deps, view: VersionView, pool: str | None) -> tuple[WorkerRecord, bool]:
    """Return a worker on whose kind of device the race is to take place, and whether it has the version ready.

    Raises Failure(INVALID, CONFLICT, MODEL, MEMORY).
    """
    manifest = view.manifest
    if pool is not None and pool not in view.pools:
        raise unknown_pool("pool", pool, view.pools)
    if view.state is State.STANDBY:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD_WAIT_S):
                await deps.load(manifest, LOAD_S_MAX)
        view = _published(deps, manifest.model, manifest.version)
    pools = view.pools if pool is None else (pool,)
    for one in pools:
        for replica in view.replicas:
            if replica.worker.pool == one and replica.instance.state is State.READY:
                return replica.worker, True
    for one in pools if view.state in _LOADS else ():
        for worker in deps.catalog.snapshot.workers:
            loads = not worker.formats or manifest.source_format in worker.formats
            if worker.pool == one and loads and not worker.draining:
                return worker, False
    raise Failure(
        Code.CONFLICT,
        f"no worker of {pools_text(list(pools))} has or loads version {manifest.version} of '{manifest.model}': a race "
        f"measures on a worker that serves it. Start one (`millstream up --pool {pools[0]}=1`), or load the model "
        f"(`millstream load {manifest.model}`)",
    )


def _request(deps: Deps, view: VersionView, found: tuple[WorkerRecord, bool], asked: RaceRequest) -> Job:
    """Queue the race, unless it waits or runs already. Blocking. Raises Failure(CONFLICT, STORAGE)."""
    manifest, (worker, ready) = view.manifest, found
    fingerprint = worker.hardware.fingerprint if worker.hardware is not None else ""
    here = environment(fingerprint, worker.packages)
    now = time.time()  # noqa: TID251 - for people
    why = "" if ready else _BEING_LOADED
    options = RaceOptions.model_validate(asked.model_dump())
    first = new_job(manifest, worker.kind, here, worker.pool, now)
    first = first.model_copy(update={"options": options, "why": why})

    def change(job: Job | None) -> Job | None:
        if job is None or job.content != first.content:
            return first
        if job.state.ended:
            return job.requeued(now, options, worker.pool).model_copy(update={"why": why})
        if job.options != options:
            raise Failure(
                Code.CONFLICT,
                f"a race of version {manifest.version} of '{manifest.model}' is {job.state.value} with other options: "
                "wait for its end, or cancel it (DELETE)",
            )
        return None

    job = Jobs(deps.repository).put(first, change)
    assert job is not None, "it was there, or was written"
    return job


def _find(deps: Deps, view: VersionView, pool: str | None) -> Job:
    """Return the race of a version that was asked for last. Blocking. Raises Failure(NOT_FOUND)."""
    manifest = view.manifest
    for job in Jobs(deps.repository).of(manifest.model, manifest.version):
        if job.content == content_digest(manifest) and pool in {None, job.pool}:
            return job
    where = "" if pool is None else f" in pool '{pool}'"
    raise not_found(
        f"no race of version {manifest.version} of '{manifest.model}' was asked for{where}: "
        f"`millstream race {manifest.model}` begins one"
    )


async def _changed(
    deps: Deps, view: VersionView, pool: str | None, change: _Change, audited_as: tuple[str, str]
) -> RaceDocument:
    """Change the race of a version that was asked for last. `audited_as`: the action, and the event after it."""
    name, version = view.manifest.model, view.manifest.version
    action, event = audited_as
    with audited(action, name, version=version):
        race = await in_storage_thread(change, deps, view, pool)
    audit(event, name, version=version, pool=race.pool)
    return await asyncio.to_thread(_document, deps, view.manifest, race)


def _cancel(deps: Deps, view: VersionView, pool: str | None) -> Job:
    job = _find(deps, view, pool)
    now = time.time()  # noqa: TID251 - for people

    def change(present: Job | None) -> Job | None:
        if present is None or present.state is RaceState.CANCELLED:
            return None
        if present.state.ended:
            raise Failure(Code.CONFLICT, f"the race is over ({present.state.value}): to take a verdict back, undo it")
        return present.ended(RaceState.CANCELLED, now, "it was cancelled")

    return Jobs(deps.repository).put(job, change) or job


def _undo(deps: Deps, view: VersionView, pool: str | None) -> Job:
    job, jobs = _find(deps, view, pool), Jobs(deps.repository)
    now = time.time()  # noqa: TID251 - for people
    undone = RaceUndone(why="it was asked for", at=now, automatic=False)
    served = undo(Selections(deps.repository), jobs, view.manifest, job, undone)
    after = jobs.get(job) or job
    if not served and after.undone is None:
        raise Failure(
            Code.CONFLICT,
            f"version {job.version} of '{job.model}' is served by its own file: there is nothing to undo",
        )
    return after


def _document(deps: Deps, manifest: Manifest, job: Job) -> RaceDocument:
    serving = Selections(deps.repository).get(manifest, job.kind, job.device) is not None
    if job.state is RaceState.QUEUED and not has_worker(job, deps.catalog.snapshot.workers):
        why = f"no worker of pool '{job.pool}' has its device now: it waits for one"
        job = job.model_copy(update={"why": why})
    return RaceDocument.of(job, serving=serving)


def races_of(deps: Deps, manifest: Manifest) -> dict[str, list[RaceSummary]]:
    """Return the section `races` of the page of a version. Blocking."""
    selections = Selections(deps.repository)
    found = [
        RaceSummary(
            kind=job.kind,
            state=job.state.value,
            winner=job.winner,
            ratio=job.ratio,
            serving=selections.get(manifest, job.kind, job.device) is not None,
            undone=job.undone.why if job.undone is not None else None,
        )
        for job in Jobs(deps.repository).of(manifest.model, manifest.version)
    ]
    return {"races": found}


_ADMIN_PATH = f"/admin/v1{_PATH}"
_WRITE = Row(Need.WRITE, "name", changes=True, admin=True)
_TAG = Tag("admin: races", "Compiled forms of a version, measured.", Place.OPEN)
ADAPTER = Adapter(
    routes=(Routes(router, _TAG, keyed=True, order=310),),
    access={
        ("GET", _ADMIN_PATH): Row(Need.READ, "name", admin=True),
        ("POST", _ADMIN_PATH): _WRITE,
        ("DELETE", _ADMIN_PATH): _WRITE,
        ("POST", f"{_ADMIN_PATH}/undo"): _WRITE,
        ("PUT", f"{_ADMIN_PATH}/samples"): _WRITE,
    },
    schemas=(RaceRequest,),
)
