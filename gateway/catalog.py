"""catalog: what models there are and who serves them, read again when somebody says so and at least once a second.

repository + workers' records ──> Snapshot (immutable) ──> `on_snapshot` (lanes), waiting callers
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from gateway.deps import UploadKey
from gateway.views import ModelView, Placed, Snapshot, VersionView
from services.cancel import cancel_all
from services.errors import Code, Failure
from services.manifest import Endpoint, Manifest
from services.queue.board import Board
from services.records import State, WorkerRecord
from services.repository.base import Repository
from services.repository.verdicts import Verdict

log = logging.getLogger("millrace.catalog")

LOOK_S = 1.0
AGREE_S_MAX = 2.0  # a gateway that is too slow for this hears of a change when it looks the next time
AGREE_PAUSE_S = 0.01
Stored = tuple[Endpoint, dict[int, tuple[Manifest, Verdict]]]
_BEST_FIRST = (State.READY, State.WARMING, State.LOADING, State.DRAINING, State.FAILED)


class Catalog:
    """`name`: of this gateway. `board`: the records in Redis. `news`: what to do with messages, by their kinds: "died:cpu-0-…" goes to "died"."""

    def __init__(
        self,
        name: str,
        repository: Repository,
        board: Board,
        on_snapshot: Callable[[Snapshot], Awaitable[None]],
        news: Mapping[str, Callable[[str], Awaitable[None]]],
    ) -> None:
        self.snapshot = Snapshot({}, ())
        self.uploads: Mapping[UploadKey, State] = {}
        self._name = name
        self._repository = repository
        self._board = board
        self._on_snapshot = on_snapshot
        self._news = news
        self._receiving: dict[UploadKey, State] = {}  # uploads of this gateway
        self._token = ""
        self._stored: dict[str, Stored] = {}
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._agents: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.refresh()
        self._agents = [asyncio.create_task(self._look()), asyncio.create_task(self._listen())]

    async def stop(self) -> None:
        await cancel_all(self._agents)
        with suppress(Failure):
            await self._board.set_gateway(self._name, None)
        await self._board.close()

    async def refresh(self) -> None:
        """Read the repository, if it changed, and the workers' records. While Redis is away the last records stay."""
        async with self._refreshing:
            token = await asyncio.to_thread(self._repository.token)
            if token != self._token:
                self._stored = await asyncio.to_thread(self._read)
                self._token = token
            workers = self.snapshot.workers
            with suppress(Failure):
                workers = await self._board.workers()
                await self._show_uploads()
            snapshot = Snapshot({name: self._model(name, workers) for name in self._stored}, workers)
            if snapshot != self.snapshot:
                self.snapshot = snapshot
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
                await self._on_snapshot(snapshot)
            with suppress(Failure):
                await self._board.set_gateway(self._name, token)

    async def announce(self, model: str) -> None:
        """Tell the other gateways that the repository changed, and return when all route by it. Workers watch it."""
        with suppress(Failure):
            await self._board.publish(f"model:{model}")
        await self.refresh()
        with suppress(Failure, TimeoutError):
            async with asyncio.timeout(AGREE_S_MAX):
                while any(token != self._token for token in (await self._board.gateways()).values()):
                    await asyncio.sleep(AGREE_PAUSE_S)
                    await self.refresh()

    async def next_change(self, timeout_s: float) -> bool:
        """Wait until the snapshot changes; False when `timeout_s` passed first."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def set_upload(self, model: str, version: int | None, state: State | None) -> None:
        """Make an upload in progress visible to all gateways; None: it has ended."""
        if state is None:
            self._receiving.pop((model, version), None)
        else:
            self._receiving[model, version] = state
        with suppress(Failure):
            if state is None:
                await self._board.set_upload(model, version, None)
            await self._show_uploads()

    async def _show_uploads(self) -> None:
        """Say that ours go on, which nobody believes for long, and see those of all gateways."""
        for (model, version), state in list(self._receiving.items()):
            await self._board.set_upload(model, version, state)
        self.uploads = await self._board.uploads()

    def _read(self) -> dict[str, Stored]:
        stored: dict[str, Stored] = {}
        for model in self._repository.models():
            with _skipping_damage():
                endpoint = self._repository.endpoint(model)
                manifests: dict[int, tuple[Manifest, Verdict]] = {}
                for version in self._repository.versions(model):
                    with _skipping_damage():
                        manifest = self._repository.manifest(model, version)
                        manifests[version] = (manifest, self._repository.verdicts.of(manifest))
                stored[model] = (endpoint, manifests)
        return stored

    def _model(self, name: str, workers: tuple[WorkerRecord, ...]) -> ModelView:
        endpoint, manifests = self._stored[name]
        versions = {
            version: _version(manifest, verdict, workers, loaded=endpoint.serves(version))
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
        )

    def _serving(self, name: str, endpoint: Endpoint, versions: Mapping[int, VersionView]) -> int | None:
        """The active version once it is ready; until then the one that served before, or the newest that is ready.

        Once a version has served it stays, though its workers may be gone for a moment: requests wait for them.
        """
        active = endpoint.active if endpoint.active in versions else None
        if active is not None and versions[active].ready:
            return active
        before = self.snapshot.models.get(name)
        if before is not None and before.serving == active:
            return active
        ready = [number for number in sorted(versions, reverse=True) if versions[number].ready]
        others = (before.serving if before is not None else None, endpoint.previous, *ready)
        return next((number for number in others if number in ready), active)

    async def _look(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S)
            self._wake.clear()
            try:
                await self.refresh()
            except Failure as failure:
                log.warning("%s", failure.message)
            except Exception:
                log.exception("reading the models failed; trying again")

    async def _listen(self) -> None:
        while True:
            try:
                async for message in self._board.messages():
                    kind, _, what = message.partition(":")
                    if kind in self._news:
                        await self._news[kind](what)
                    self._wake.set()
            except Failure:
                await asyncio.sleep(LOOK_S)
            except Exception:
                log.exception("a message could not be used")


@contextmanager
def _skipping_damage() -> Iterator[None]:
    """What was removed in between, or is damaged, is left out; everything else goes on."""
    try:
        yield
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            log.warning("%s", failure.message)


def _version(manifest: Manifest, verdict: Verdict, workers: tuple[WorkerRecord, ...], *, loaded: bool) -> VersionView:
    release = manifest.release
    placed = tuple(
        Placed(worker, instance) for worker in workers for instance in worker.instances if instance.release == release
    )
    if not loaded:
        return VersionView(manifest, State.UNLOADED, None, placed, verdict)
    states = {at.instance.state for at in placed}
    state = next((state for state in _BEST_FIRST if state in states), State.UPLOADED)
    if verdict.failed and state is not State.READY:  # who holds it already goes on with it
        return VersionView(manifest, State.FAILED, verdict.failed, placed, verdict)
    reason = next((at.instance.reason for at in placed if at.instance.state is state and at.instance.reason), None)
    return VersionView(manifest, state, reason, placed, verdict)
