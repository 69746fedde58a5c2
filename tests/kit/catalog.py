"""A catalog in this process over a real repository; only the workers are set by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from millstream.gateway.catalog.catalog import UploadKey
from millstream.gateway.catalog.snapshot import ModelView, Replica, Snapshot, VersionView
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.placement.pools import kinds_of, learn, pools_of
from millstream.services.repository.folder import FolderRepository
from millstream.services.wire.batch import BATCH_FORMATS
from millstream.services.wire.records import InstanceRecord, State, WorkerRecord

#: a version has the best state of its instances
_BEST_FIRST = (State.READY, State.WARMING, State.LOADING, State.DRAINING, State.FAILED)


class RepositoryCatalog:
    """Has what other parts use of millstream.gateway.catalog.catalog.Catalog.

    `announced` lists the models that were announced, in order.
    """

    def __init__(self, repository: FolderRepository) -> None:
        self._repository = repository
        self._workers: tuple[WorkerRecord, ...] = ()
        self._moved = asyncio.Condition()  # the snapshot or an upload changed
        self.snapshot = Snapshot(models={}, workers=())
        self.uploads: dict[UploadKey, State] = {}
        self.upload_states: list[tuple[UploadKey, State | None]] = []
        self.announced: list[str] = []

    async def refresh(self) -> None:
        pools = learn(self.snapshot.pools, self._workers)
        self.snapshot = replace(self.snapshot, pools=pools)
        models = {name: self._model(name) for name in self._repository.models()}
        snapshot = Snapshot(models=models, workers=self._workers, pools=pools)
        if snapshot != self.snapshot:
            self.snapshot = snapshot
            await self._notify()

    def replicas(self, content_id: str) -> tuple[Replica, ...]:
        return tuple(
            Replica(worker, instance)
            for worker in self._workers
            for instance in worker.instances
            if instance.content_id == content_id
        )

    async def announce(self, model: str) -> None:
        self.announced.append(model)
        await self.refresh()

    async def next_change(self, timeout_s: float) -> bool:
        before = self.snapshot
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: self.snapshot is not before)
        except TimeoutError:
            return False
        return True

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until `true` holds; it is called after each change of the snapshot or the uploads."""
        async with self._moved:
            await self._moved.wait_for(true)

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        self.upload_states.append(((model, version), state))
        if state is None:
            self.uploads.pop((model, version), None)
        else:
            self.uploads[model, version] = state
        await self._notify()

    async def set_workers(self, *workers: WorkerRecord) -> None:
        """Replace the live workers by these."""
        self._workers = workers
        await self.refresh()

    def _model(self, name: str) -> ModelView:
        endpoint = self._repository.endpoint(name)
        numbers = self._repository.versions(name)
        versions = {number: self._version(self._repository.manifest(name, number), endpoint) for number in numbers}
        active = versions.get(endpoint.active) if endpoint.active is not None else None
        serving = endpoint.active if active is None or active.loaded else None
        before = versions.get(endpoint.previous) if endpoint.previous is not None else None
        if before is not None and before.ready and not (serving in versions and versions[serving].ready):
            serving = endpoint.previous
        return ModelView(
            name,
            endpoint.active,
            serving,
            versions,
            source=endpoint.source,
            failure=endpoint.failure,
            unloaded=endpoint.loaded == (),
        )

    def _version(self, manifest: Manifest, endpoint: Endpoint) -> VersionView:
        replicas = self.replicas(manifest.content_id)
        best = min(replicas, key=lambda one: _BEST_FIRST.index(one.instance.state), default=None)
        verdict = self._repository.verdicts.of(manifest)
        pools = pools_of(manifest, endpoint.placement, self.snapshot.pools)
        if not endpoint.serves(manifest.version):
            return VersionView(manifest, State.UNLOADED, None, replicas, verdict, pools)
        failed = verdict.failed_on(kinds_of(pools, self.snapshot.pools))
        if failed and not (best and best.instance.state is State.READY):
            return VersionView(manifest, State.FAILED, failed, replicas, verdict, pools)
        return VersionView(
            manifest=manifest,
            state=best.instance.state if best else State.PENDING,
            reason=best.instance.reason if best else None,
            replicas=replicas,
            verdict=verdict,
            pools=pools,
        )


def worker(*instances: InstanceRecord, name: str = "cpu-1", pool: str = "cpu", heartbeat: float = 0.0) -> WorkerRecord:
    """Return the record of a worker with these instances."""
    return WorkerRecord(
        id=name,
        pool=pool,
        device="cpu",
        backend="onnxruntime",
        pid=4711,
        host="here",
        started=1.0,
        heartbeat=heartbeat,
        batch_formats=BATCH_FORMATS,
        instances=instances,
    )


def instance(manifest: Manifest, state: State = State.READY, reason: str | None = None) -> InstanceRecord:
    """Return the record of an instance of the version that `manifest` describes."""
    return InstanceRecord(
        content_id=manifest.content_id,
        model=manifest.model,
        version=manifest.version,
        state=state,
        reason=reason,
        profile={1: 0.001, 2: 0.0015},
        rows_max=64,
        rows_efficient=16,
        resident_bytes=1234,
    )
