"""The JSON documents of the admin API about pools and workers, made from a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, Field

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.services.wire.records import DeviceRecord, InstanceRecord, State, WorkerRecord


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


class WorkerInstance(BaseModel):
    """A version in a worker."""

    model: str
    version: int
    state: State
    reason: str | None = None
    profile: dict[int, float] = Field({}, description="Rows of a run -> measured seconds.")
    rows_max: int = Field(description="Rows of the largest run.")
    size_bytes: int

    @classmethod
    def of(cls, record: InstanceRecord) -> Self:
        return cls(
            model=record.model,
            version=record.version,
            state=record.state,
            reason=record.reason,
            profile=record.profile,
            rows_max=record.rows_max,
            size_bytes=record.resident_bytes,
        )


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


def pools(snapshot: Snapshot) -> Pools:
    """Return the pools of the live workers and of the published versions."""
    versions_of: dict[str, int] = {}
    for model in snapshot.models.values():
        for view in model.versions.values():
            for pool in view.pools:
                versions_of[pool] = versions_of.get(pool, 0) + 1
    names = sorted(set(versions_of) | {worker.pool for worker in snapshot.workers})
    return Pools(
        pools=[
            _pool(name, versions_of.get(name, 0), [worker for worker in snapshot.workers if worker.pool == name])
            for name in names
        ]
    )


def _pool(name: str, versions: int, pool_workers: Sequence[WorkerRecord]) -> Pool:
    states = [instance.state for worker in pool_workers for instance in worker.instances]
    return Pool(
        name=name,
        workers=len(pool_workers),
        devices=sorted({worker.device for worker in pool_workers}),
        backends=sorted({worker.backend for worker in pool_workers}),
        versions=versions,
        instances=len(states),
        instances_ready=states.count(State.READY),
    )


def workers(snapshot: Snapshot, now: float) -> WorkerList:
    """Return all live workers. `now`: seconds since the epoch; an age is at least 0, as a clock may be set back."""
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
                hardware=worker.hardware,
                packages=worker.packages,
                heartbeat_age_s=max(0.0, now - worker.heartbeat),
                clock_ahead_s=worker.clock_ahead_s,
                instances=[WorkerInstance.of(instance) for instance in worker.instances],
            )
            for worker in sorted(snapshot.workers, key=lambda worker: (worker.pool, worker.id))
        ]
    )
