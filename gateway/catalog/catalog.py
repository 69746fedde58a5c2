"""The models and their replicas, refreshed at each event and at least once a second.

repository + workers' records ─> names of models that changed ─> Snapshot (immutable) ─> `on_snapshot`, waiting callers
A refresh costs as much as the changes since the last refresh, whatever the number of models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress

from millstream.gateway.catalog.parts import Users, composed_view
from millstream.gateway.catalog.placements import Placements, Standby
from millstream.gateway.catalog.snapshot import ModelView, Replica, ScaleView, Snapshot, SnapshotCell, VersionView
from millstream.services.errors import Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.placement.pools import PoolTraits, kinds_of, learn, pools_of
from millstream.services.process.cancellation import cancel_all, uninterrupted
from millstream.services.process.waits import with_jitter
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.limited_client import FAREWELL_S_MAX, without_redis_after
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.stored_models import StoredModels
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import RefusalRecord, State, WorkerRecord

log = logging.getLogger("millstream.catalog")

POLL_S = 1.0
PAUSE_S_MAX = 0.1  # longest pause after a refresh, which takes at most half of the time
AGREE_S_MAX = 2.0  # longest wait for other gateways; a slower one sees the change at its next refresh
AGREE_PAUSE_S = 0.01
REDIS_S_MAX = 3.0  # a refresh waits this long for what Redis knows, and goes on with what it knew
_MODEL = "model"  # kind of message: a model was changed, by a gateway
#: (model, version) of an upload in progress; version None: the number is assigned when the version is published
UploadKey = tuple[str, int | None]
_BEST_FIRST = (State.READY, State.WARMING, State.LOADING, State.DRAINING, State.FAILED)


class Catalog:
    """What one gateway knows about models, workers and uploads.

    `uploads`: those in progress in any gateway: RECEIVING, then PENDING until a check slot is free, then CHECKING.

    Args:
        name: Name of this gateway.
        cell: Gets each new snapshot.
        scale: What is known of pools without workers.
        on_snapshot: Called with each new snapshot and the names of the models that changed.
        events: Handlers of messages, by kind: the message "died:cpu-0-…" goes to the handler of "died".
    """

    def __init__(
        self,
        name: str,
        repository: FolderRepository,
        cluster_state: ClusterState,
        cell: SnapshotCell,
        scale: ScaleView,
        on_snapshot: Callable[[Snapshot, Collection[str]], Awaitable[None]],
        events: Mapping[str, Callable[[str], Awaitable[None]]],
    ) -> None:
        self.uploads: Mapping[UploadKey, State] = {}
        self._name = name
        self._repository = repository
        self._cluster_state = cluster_state
        self._cell = cell
        self._scale = scale
        self._on_snapshot = on_snapshot
        self._events = events
        self._receiving: dict[UploadKey, State] = {}  # uploads of this gateway
        self._token = ""  # the state of the repository that was read last
        self._listed: str | None = None  # the state that this gateway routes by
        self._stored = StoredModels(repository)
        self._placements = Placements()
        self._pools: Mapping[str, PoolTraits] = {}
        self._standby = Standby()
        self._users = Users()
        self._changes: set[str] = set()  # models whose changes are not in the snapshot yet
        self._unreported: set[str] = set()  # models whose changes `on_snapshot` may not have applied
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def snapshot(self) -> Snapshot:
        """The current snapshot. It is replaced as a whole, never changed in place."""
        return self._cell.current

    async def start(self) -> None:
        await self.refresh()
        self._tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._listen())]

    async def stop(self) -> None:
        await cancel_all(self._tasks)
        async with without_redis_after(FAREWELL_S_MAX):
            await self._cluster_state.set_gateway(self._name, None)
        await self._cluster_state.close()

    def replicas(self, content_id: str) -> tuple[Replica, ...]:
        """Return the instances of a version, staged ones included, ordered by worker."""
        return self._placements.of(content_id)

    def exists(self, name: str, version: str | None) -> bool:
        """Return whether there is a model of this name, and a version of this number; None: any."""
        return self.snapshot.exists(name, version)

    async def refresh(self) -> None:
        """Read the repository, if it changed, and the workers' records. Without Redis, keep the last records."""
        async with self._refreshing:
            token = await asyncio.to_thread(self._repository.token)
            if token != self._token:
                await uninterrupted(self._read_stored(token))
            workers = self.snapshot.workers
            async with without_redis_after(REDIS_S_MAX):
                workers, self.uploads = await self._cluster_state.exchange(self._name, self._listed)
                await self._renew_uploads()
            self._changes |= self._placements.update(workers)
            asleep = self._scale.asleep({one.pool for one in workers})
            self._learn_pools(workers, asleep)
            self._changes |= self._standby.update(workers, token, asleep)
            await self._apply(workers)
            if token != self._listed:  # what it routes by now; from then on each exchange renews it
                async with without_redis_after(REDIS_S_MAX):
                    await self._cluster_state.set_gateway(self._name, token)
                self._listed = token

    async def _read_stored(self, token: str) -> None:
        self._changes |= await asyncio.to_thread(self._stored.read)
        self._token = token

    def _learn_pools(self, workers: tuple[WorkerRecord, ...], asleep: Collection[str]) -> None:
        """Note the pools of the workers. Models that name no pool may be served by a new one.

        Args:
            workers: the live workers.
            asleep: pools without workers, which this gateway has perhaps never seen: what they load is not known.
        """
        pools = learn(self._pools, workers)
        if unseen := [pool for pool in asleep if pool not in pools]:
            pools = {**pools, **dict.fromkeys(unseen, PoolTraits(accelerated=False, formats=frozenset()))}
        if pools is not self._pools:
            self._pools = pools
            self._changes |= self._stored.models.keys()

    async def _apply(self, workers: tuple[WorkerRecord, ...]) -> None:
        """Replace the changed models in the snapshot, and report them."""
        before = self.snapshot
        models = dict(before.models)
        todo = set(self._changes)
        while todo:
            altered: set[str] = set()
            for name in todo:
                known = models.get(name)
                if name in self._stored.models:
                    models[name] = self._model(name, models)
                else:
                    models.pop(name, None)
                self._forget_removed(before.models.get(name), models.get(name))
                self._users.note(name, models.get(name))
                if self._users.of(name) and models.get(name) != known:
                    altered.add(name)
            todo = {user for name in altered for user in self._users.of(name)}
            self._changes |= todo
        changed = {name for name in self._changes if models.get(name) != before.models.get(name)}
        # Also of versions that are staged, which no model of the repository names yet.
        notable = bool(self._changes) or _notable(workers) != _notable(before.workers)
        self._cell.current = Snapshot(models if changed else before.models, workers, self._pools)
        self._changes.clear()
        # If `on_snapshot` raises, the next call reports the same models again.
        self._unreported |= changed
        await self._on_snapshot(self.snapshot, frozenset(self._unreported))
        self._unreported.clear()
        if notable:
            event, self._changed = self._changed, asyncio.Event()
            event.set()

    def _forget_removed(self, before: ModelView | None, now: ModelView | None) -> None:
        kept = {view.manifest.content_id for view in now.versions.values()} if now is not None else set()
        for view in before.versions.values() if before is not None else ():
            if view.manifest.content_id not in kept:
                self._standby.forget(view.manifest.content_id)

    async def announce(self, model: str) -> None:
        """Tell the other gateways that the repository changed, and wait until all route by it.

        Workers need no message: they watch the repository.
        """
        async with without_redis_after(REDIS_S_MAX):
            await self._cluster_state.publish(f"{_MODEL}:{model} {self._name}")
        await self.refresh()
        until = time.monotonic() + AGREE_S_MAX
        with suppress(Failure):  # the change is made
            while time.monotonic() < until and await self._others_differ():
                await asyncio.sleep(AGREE_PAUSE_S)
                await self.refresh()  # never cancelled: what it had read of the repository would be lost

    async def _others_differ(self) -> bool:
        """Return whether another gateway routes by another state of the repository; without Redis False."""
        tokens: Mapping[str, str] = {}
        async with without_redis_after(AGREE_S_MAX):
            tokens = await self._cluster_state.gateways()
        return any(token != self._token for token in tokens.values())

    async def next_change(self, timeout_s: float) -> bool:
        """Wait until the snapshot changes. Returns False if `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        """Publish the state of an upload to all gateways. `state` None: the upload has ended."""
        if state is None:
            self._receiving.pop((model, version), None)
        else:
            self._receiving[model, version] = state
        with suppress(Failure):
            if state is None:
                await self._cluster_state.set_upload(model, version, None)
            await self._renew_uploads()
            self.uploads = await self._cluster_state.uploads()

    async def _renew_uploads(self) -> None:
        """Renew the records of this gateway's uploads, which expire soon."""
        for (model, version), state in list(self._receiving.items()):
            await self._cluster_state.set_upload(model, version, state)
            if (model, version) not in self._receiving:  # it ended meanwhile
                await self._cluster_state.set_upload(model, version, None)

    def _model(self, name: str, models: Mapping[str, ModelView]) -> ModelView:
        endpoint, manifests = self._stored.models[name]
        versions = {
            version: composed_view(endpoint, manifest, verdict, models)
            if manifest.parts
            else self._version(endpoint, manifest, verdict)
            for version, (manifest, verdict) in manifests.items()
        }
        loaded = {version: view for version, view in versions.items() if view.loaded}
        serving = self._serving(name, endpoint, loaded)
        return ModelView(
            name,
            endpoint.active,
            serving,
            versions,
            source=endpoint.source,
            failure=endpoint.failure,
            unloaded=endpoint.loaded == (),
            placement=endpoint.placement,
        )

    def _version(self, endpoint: Endpoint, manifest: Manifest, verdict: Verdict) -> VersionView:
        content_id = manifest.content_id
        pools = pools_of(manifest, endpoint.placement, self._pools)
        replicas = self._placements.of(content_id)
        if not endpoint.serves(manifest.version):
            self._standby.forget(content_id)
            return VersionView(manifest, State.UNLOADED, None, replicas, verdict, pools)
        states = {at.instance.state for at in replicas}
        state = next((state for state in _BEST_FIRST if state in states), None)
        failed = verdict.failed_on(kinds_of(pools, self._pools))
        if failed and state is not State.READY:  # workers that have it loaded keep it
            return VersionView(manifest, State.FAILED, failed, replicas, verdict, pools)
        if state is None or state is State.FAILED:
            failed_in = {at.worker.pool for at in replicas}
            left = tuple(pool for pool in pools if pool not in failed_in)
            if state is None or self._standby.staffed(left):
                state = self._standby.state(content_id, manifest.model, left)
        else:
            self._standby.loaded(content_id)
        of_state = (at.instance.reason for at in replicas if at.instance.state is state)
        reason = next((reason for reason in of_state if reason), None)
        on_demand = self._standby.was_on_standby(content_id)
        return VersionView(manifest, state, reason, replicas, verdict, pools, on_demand)

    def _serving(self, name: str, endpoint: Endpoint, versions: Mapping[int, VersionView]) -> int | None:
        """Return the version that answers requests without a version; None if none was ever activated.

        That is the active version once it is ready; until then the version that served before, or the newest that is
        ready. A version that has served is kept while it has no workers: requests wait for them. An active version on
        standby serves unless the version before it is ready. If it failed, the version before it serves on, also from
        standby.
        """
        if endpoint.active is None:
            return None
        active = endpoint.active if endpoint.active in versions else None
        if active is not None and versions[active].ready:
            return active
        before = self.snapshot.models.get(name)
        if before is not None and before.serving == active:
            return active
        state = None if active is None else versions[active].state
        served = [] if before is None else [before.serving]
        others = [number for number in (*served, endpoint.previous) if number is not None and number in versions]
        answering = [number for number in others if versions[number].ready]
        if state is not State.STANDBY:
            answering += [number for number in sorted(versions, reverse=True) if versions[number].ready]
        if state is State.FAILED:
            answering += [number for number in others if versions[number].available]
        return next(iter(answering), active)

    async def _poll(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S - time.monotonic() % POLL_S):
                    await self._wake.wait()
            self._wake.clear()
            began = time.monotonic()
            try:
                await self.refresh()
            except Failure as failure:
                log.warning("%s", failure.message)
            except Exception:
                log.exception("refreshing the catalog failed; trying again")
            # Events come in bursts, for example when many models are registered: one refresh serves several.
            await asyncio.sleep(min(PAUSE_S_MAX, time.monotonic() - began))

    async def _listen(self) -> None:
        while True:
            try:
                async for message in self._cluster_state.messages():
                    kind, _, text = message.partition(":")
                    if kind == _MODEL and text.endswith(f" {self._name}"):
                        continue  # `announce` refreshes
                    if kind in self._events:
                        await self._events[kind](text)
                    self._wake.set()
            except Failure:
                await asyncio.sleep(with_jitter(POLL_S))
            except Exception:
                log.exception("an event could not be handled")


def _notable(workers: Sequence[WorkerRecord]) -> list[tuple[str, tuple[RefusalRecord, ...]]]:
    """Return what callers of `next_change` wait for, besides instances."""
    return [(worker.id, worker.refusals) for worker in workers]
