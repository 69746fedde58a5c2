"""Pools, workers, and how much processes log; and what the admin API registers: all of its routes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from millstream.gateway.admin import (
    routes_keys,
    routes_models,
    routes_placement,
    routes_uploads,
    schemas_models,
)
from millstream.gateway.catalog.snapshot import visible
from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.http.body import DOCUMENT_BYTES_MAX, read_body
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body
from millstream.gateway.tensors.json_text import parse_json
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import invalid
from millstream.services.process.audit import audit
from millstream.services.process.log_level import KINDS, LEVELS
from millstream.services.wire.records import DeviceRecord, State, WorkerRecord


class Pool(BaseModel):
    """Workers that may serve the same versions. A pool without workers is listed if versions name it."""

    name: str
    workers: int
    devices: list[str]
    backends: list[str]
    versions: int = Field(description="Published versions that this pool may serve.")
    instances: int
    instances_ready: int


class Pools(BaseModel):
    """All pools that have a worker or that a version names."""

    pools: list[Pool]


class WorkerInstance(BaseModel, from_attributes=True):
    """A version in a worker."""

    model: str
    version: int
    state: State
    reason: str | None = None
    profile: dict[int, float] = Field({}, description="Rows of a run -> measured seconds.")
    rows_max: int = Field(description="Rows of the largest run.")
    size_bytes: int = Field(validation_alias="resident_bytes")


class WorkerInfo(BaseModel):
    """A worker process whose heartbeats arrive."""

    id: str
    pool: str
    device: str
    backend: str
    pid: int
    host: str
    started: float = Field(description="Seconds since the epoch.")
    heartbeat_age_s: float
    clock_ahead_s: int | None = Field(
        None, description="Whole seconds by which its machine's clock is ahead of the Redis clock."
    )
    hardware: DeviceRecord | None = Field(None, description="What the worker runs on.")
    packages: dict[str, str] = Field({}, description="Inference libraries that are installed there, with versions.")
    instances: list[WorkerInstance]


class WorkerList(BaseModel):
    """All live workers, by pool and name."""

    workers: list[WorkerInfo]


Level = Literal["debug", "info", "warning", "error"]


class LogLevels(BaseModel):
    """The least level of the records that processes log, by kind; null: the default, info."""

    gateway: Level | None = Field(None, description="Of the gateways of the installation.")
    worker: Level | None = Field(None, description="Of the workers of the installation.")
    controller: Level | None = Field(None, description="Of the controllers of the installation.")


pools_router = APIRouter(prefix="/admin/v1")
logs_router = APIRouter(prefix="/admin/v1")


@pools_router.get("/pools", summary="Worker pools and how much of each is ready")
async def list_pools(deps: DepsOf) -> Pools:
    snapshot = visible(deps.catalog.snapshot, Need.READ)
    views = [view for model in snapshot.models.values() for view in model.versions.values()]
    versions = Counter(pool for view in views for pool in view.pools)
    names = sorted({*versions, *(worker.pool for worker in snapshot.workers)})
    return Pools(pools=[_pool(name, versions[name], snapshot.workers) for name in names])


def _pool(name: str, versions: int, all_workers: Sequence[WorkerRecord]) -> Pool:
    workers = [worker for worker in all_workers if worker.pool == name]
    states = [instance.state for worker in workers for instance in worker.instances]
    return Pool(
        name=name,
        workers=len(workers),
        devices=sorted({worker.device for worker in workers}),
        backends=sorted({worker.backend for worker in workers}),
        versions=versions,
        instances=len(states),
        instances_ready=states.count(State.READY),
    )


@pools_router.get("/workers", summary="Live workers and the versions in each")
async def list_workers(deps: DepsOf) -> WorkerList:
    now = time.time()  # noqa: TID251 - ClusterState converts heartbeats to this clock
    workers = sorted(visible(deps.catalog.snapshot, Need.READ).workers, key=lambda worker: (worker.pool, worker.id))
    # an age is at least 0, as a clock may be set back
    ages = [{"heartbeat_age_s": max(0.0, now - worker.heartbeat)} for worker in workers]
    found = [WorkerInfo.model_validate(dict(worker) | age) for worker, age in zip(workers, ages, strict=True)]
    return WorkerList(workers=found)


@logs_router.get("/log-level", summary="How much the processes of the installation log", responses=documented(503))
async def get_log_level(deps: DepsOf) -> LogLevels:
    return LogLevels(**await deps.log_levels.read())


@logs_router.put(
    "/log-level",
    summary="Change how much the processes of the installation log",
    description="Kinds that the document leaves out keep their level; null restores the default, info. The processes "
    "of all machines follow within about a second, without a restart, and a process that starts later has the level, "
    "too. All levels are the default again a day after the last change, and when Redis loses its data. A process that "
    "does not reach Redis keeps its level.",
    responses=documented(400, 413, 503),
    openapi_extra=json_body(LogLevels, example={"worker": "debug"}),
)
async def put_log_level(request: Request, deps: DepsOf) -> LogLevels:
    changes = _checked(parse_json(await read_body(request, DOCUMENT_BYTES_MAX)))
    levels = await deps.log_levels.update(changes)
    audit("log levels changed", None, **{kind: level or "default" for kind, level in changes.items()})
    return LogLevels(**levels)


def _checked(document: Any) -> dict[str, str | None]:
    """Return the levels by kind. Raises Failure(INVALID)."""
    if not isinstance(document, dict) or not document:
        raise invalid('send an object like {"worker": "debug"}')
    for kind, level in document.items():
        if kind not in KINDS:
            raise invalid(f"there is no kind of process {str(kind)[:80]!r}; there are: {', '.join(KINDS)}")
        if level is not None and not (isinstance(level, str) and level in LEVELS):
            raise invalid(f"the level of {kind} must be one of {', '.join(LEVELS)}, or null for the default")
    return document


_MODELS = Tag("admin: models", "Models and their versions: upload, activate, delete.", Place.OPEN)
_PLACEMENT = Tag("admin: placement", "Which worker holds what.", Place.OPEN)
_KEYS = Tag("admin: keys", "API keys, and the audit log.", Place.OPEN)
_POOLS = Tag("admin: pools", "Worker pools and workers.", Place.OPEN)
_LOGS = Tag("admin: logs", "How much processes log.", Place.OPEN)


def _rows() -> Iterator[tuple[tuple[str, str], Row]]:
    read, write = Row(Need.READ, admin=True), Row(Need.WRITE, "name", changes=True, admin=True)
    keys, change = Row(Need.ADMIN, admin=True), Row(Need.ADMIN, changes=True, admin=True)
    one = "/admin/v1/models/{name}"
    version = f"{one}/versions/{{version}}"
    for name in ("models", "placement", "pools", "workers", "audit", "log-level"):
        yield ("GET", f"/admin/v1/{name}"), read
    for path in (one, version, f"{one}/settings"):
        yield ("GET", path), Row(Need.READ, "name", admin=True)
    for method, path in (
        ("PATCH", one),
        ("DELETE", one),
        ("PUT", version),
        ("DELETE", version),
        ("POST", f"{one}/versions"),
        ("POST", f"{version}/activate"),
    ):
        yield (method, path), write
    for method, path, row in (
        ("GET", "", keys),
        ("GET", "/{key}", keys),
        ("POST", "", change),
        ("PATCH", "/{key}", change),
        ("POST", "/{key}/rotate", change),
        ("DELETE", "/{key}", change),
    ):
        yield (method, f"/admin/v1/keys{path}"), row
    yield ("PUT", "/admin/v1/log-level"), change


ADAPTER = Adapter(
    routes=(
        Routes(routes_models.router, _MODELS, keyed=True, order=300),
        Routes(routes_uploads.router, _MODELS, keyed=True, order=300),
        Routes(routes_placement.router, _PLACEMENT, keyed=True, order=320),
        Routes(routes_keys.router, _KEYS, keyed=True, order=340),
        Routes(pools_router, _POOLS, keyed=True, order=340),
        Routes(logs_router, _LOGS, keyed=True, order=340),
    ),
    access=dict(_rows()),
    schemas=(
        routes_keys.NewKey,
        routes_keys.KeyChanges,
        routes_keys.Rotation,
        LogLevels,
        schemas_models.UploadForm,
    ),
)
