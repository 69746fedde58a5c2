"""What a key may keep, on disk and always in memory, and how many uploads it may send at once.

upload begins ─> in flight? models? bytes? ─> received, checked ─> models? bytes? ─> published
settings change ─> pinned, always loaded ─> memory? ─> stored

Models and bytes count for the key that owns the model, whoever uploads. Uploads in flight at the same time do not see
each other: together they may exceed a quota by what they bring. What is loaded, workers decide (placement.quota).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from millstream.gateway.access.gate import Gate
from millstream.gateway.access.principal import CALLER, LIMITED, owner_name
from millstream.gateway.catalog.catalog import Catalog, UploadKey
from millstream.gateway.catalog.snapshot import ModelView, Snapshot
from millstream.services.access.limits import LimitReached
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.placement.quota import counted
from millstream.services.placement.views import Footprint
from millstream.services.process.audit import caller
from millstream.services.process.caller_slots import CallerSlots
from millstream.services.repository.folder import FolderRepository
from millstream.services.sizes import sizes
from millstream.services.wire.records import State, WorkerRecord

FootprintOf = Callable[[Manifest, WorkerRecord], Footprint]


AT_ONCE_MAX = 8  # uploads of one gateway; further uploads are refused
OF_CALLERS_MAX = 16  # the same with the first upload of each caller, so that slow ones of one do not refuse all others
RETRY_AFTER_S = 5.0


class UploadSlots:
    """Limits uploads in progress: each takes disk bandwidth and, during its check, a core and memory."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._slots = CallerSlots(AT_ONCE_MAX, OF_CALLERS_MAX)
        self._running: Counter[UploadKey] = Counter()

    @asynccontextmanager
    async def acquire(self, model: str, version: int | None) -> AsyncIterator[Callable[[State], Awaitable[None]]]:
        """Take a slot for one upload. The upload is visible as RECEIVING; the yielded function publishes another state.

        Raises Failure(UNAVAILABLE) when too many uploads are in progress.
        """
        if not self._slots.may_take(caller()):
            raise Failure(
                Code.UNAVAILABLE,
                "as many uploads are in progress as are taken at once: try again",
                retry_after_s=RETRY_AFTER_S,
            )

        async def show(state: State) -> None:
            await self._catalog.set_upload(model, version, state)

        key = (model, version)
        async with self._slots.acquire(caller()):
            self._running[key] += 1
            try:
                await show(State.RECEIVING)
                yield show
            finally:
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]
                    await self._catalog.set_upload(model, version, None)


class Quotas:
    """The quotas of all keys, in one gateway."""

    def __init__(self, gate: Gate, catalog: Catalog, repository: FolderRepository) -> None:
        self._gate = gate
        self._catalog = catalog
        self._repository = repository

    @asynccontextmanager
    async def upload(self, model: str, size_bytes: int) -> AsyncIterator[Callable[[int], None]]:
        """Count an upload of the caller of the current task while the block runs.

        Args:
            model: its name.
            size_bytes: of the upload; 0: not known.

        Yields what checks the quotas again, given the bytes of the version. It blocks, and raises as this does.

        Raises:
            Failure: FORBIDDEN: it would be more than the owner of the model may keep. LimitReached: too many uploads.
        """
        principal = CALLER.get()
        account = None if principal is None else principal.account
        if principal is not None and account is not None:
            try:
                account.begin_upload()
            except LimitReached:
                principal.count(LIMITED)
                raise
        try:
            check = partial(self._check, model, owner_name())
            await asyncio.to_thread(check, size_bytes)
            yield check
        finally:
            if account is not None:
                account.end_upload()

    def _check(self, model: str, key: str, size_bytes: int) -> None:
        """Raise Failure(FORBIDDEN) if a version of so many bytes exceeds a quota. `key`: that of a new model."""
        models = self._catalog.snapshot.models
        owner = models[model].placement.owner if model in models else key
        limits = self._gate.limits_of(owner)
        if limits is None:
            return
        owned = [name for name, view in models.items() if view.placement.owner == owner]
        if limits.models is not None and model not in models and len(owned) >= limits.models:
            raise Failure(
                Code.FORBIDDEN,
                f"key '{owner}' has {len(owned)} models, and its limit is {limits.models}: delete one of them",
            )
        if limits.disk_bytes is None:
            return
        kept = sum(map(self._repository.size_bytes, owned))
        if kept + max(size_bytes, 1) > limits.disk_bytes:
            needed, there = sizes(kept + size_bytes, limits.disk_bytes)
            raise Failure(
                Code.FORBIDDEN,
                f"the models of key '{owner}' would take {needed} of the disk, and its limit is {there}: "
                "delete versions",
            )

    def check_settings(self, model: str, settings: EndpointPlacement, footprint_of: FootprintOf) -> None:
        """Raise Failure(FORBIDDEN) if a key's models would always take more memory than it may. Blocking: reads files.

        Args:
            model: whose settings change.
            settings: the new ones.
            footprint_of: returns what a version takes in a worker.
        """
        limits = self._gate.limits_of(settings.owner)
        if limits is None or limits.memory_bytes is None or not _always(settings):
            return
        snapshot, size_bytes = self._catalog.snapshot, 0
        for name, view in snapshot.models.items():
            now = settings if name == model else view.placement
            if now.owner == settings.owner and _always(now):
                size_bytes += _always(now) * _instance_bytes(view, snapshot, footprint_of)
        if size_bytes > limits.memory_bytes:
            takes, limit = sizes(size_bytes, limits.memory_bytes)
            raise Failure(
                Code.FORBIDDEN,
                f"the models of key '{settings.owner}' that are pinned or always loaded would take {takes} of memory, "
                f"and its limit is {limit}",
            )

    def lacking(self, owner: str, need: Footprint) -> str | None:
        """Return why a version is not loaded: the memory quota of its owner; None: there is none, or it has room."""
        limits = self._gate.limits_of(owner)
        if limits is None or limits.memory_bytes is None:
            return None
        taken = memory_taken(self._catalog.snapshot).get(owner, 0)
        if taken + counted(need) <= limits.memory_bytes:
            return None
        needs, takes, limit = sizes(counted(need), taken, limits.memory_bytes)
        about = "" if need.measured else "about "
        return f"it takes {about}{needs}, and the models of key '{owner}' take {takes} of the {limit} that they may"


def memory_taken(snapshot: Snapshot) -> Mapping[str, int]:
    """Return what the models of each owner take in the memory of all workers, as far as it was measured."""
    taken = Counter[str]()
    for worker in snapshot.workers:
        for one in worker.instances:
            model = snapshot.models.get(one.model)
            if model is not None:
                host, device = one.resident_bytes + one.peak_bytes, one.device_resident_bytes + one.device_peak_bytes
                taken[model.placement.owner] += host + device
    return taken


def _always(settings: EndpointPlacement) -> int:
    """Return how many instances of a model stay loaded; each worker that has it keeps one that is pinned."""
    return max(settings.instances_min, int(settings.pin))


def _instance_bytes(model: ModelView, snapshot: Snapshot, footprint_of: FootprintOf) -> int:
    """Return what an instance of the version that serves takes; 0: none serves, or no worker is there to tell."""
    version = None if model.serving is None else model.versions.get(model.serving)
    if version is None:
        return 0
    workers = (worker for pool in version.pools for worker in snapshot.workers if worker.pool == pool)
    worker = next(workers, None)
    return 0 if worker is None else counted(footprint_of(version.manifest, worker))
