"""Loads and unloads models for Triton's clients, from model repositories in place, from files and from uploads.

load ─> lock ─> read the folder, check, manifests ─> stage ─> ready in a worker ─> commit ─> tell every gateway
                                                              └> any failure ─> abort: nothing has changed
unload ─> the endpoint names no loaded version ─> gateways send it no requests, workers unload it
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from millstream.gateway.access.principal import CALLER, owner_name, shown
from millstream.gateway.admin.upload import check_right_to_serve_code
from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.catalog.parts import is_current
from millstream.gateway.catalog.snapshot import ModelView, Snapshot, VersionView
from millstream.plugins.compat.triton.await_ready import READY_S_MAX, ReadyWaiter
from millstream.plugins.compat.triton.candidates import Candidate, manifest_of
from millstream.plugins.compat.triton.config.config import ParsedConfig, from_json
from millstream.plugins.compat.triton.config.repositories import ModelRepositories
from millstream.plugins.compat.triton.ensembles import check_ensemble, ensemble_manifest, is_ensemble, models_of_steps
from millstream.plugins.compat.triton.load_changes import LoadChanges
from millstream.plugins.compat.triton.python_models import PythonModelImporter, is_python_model
from millstream.plugins.compat.triton.settings import TritonSettings
from millstream.plugins.compat.triton.version_sources import VersionSources
from millstream.services.errors import Code, Failure, Subject
from millstream.services.model.manifest import Manifest
from millstream.services.model.names import check_name
from millstream.services.nearest_names import did_you_mean
from millstream.services.process.audit import audit
from millstream.services.process.logs import about
from millstream.services.process.threads import in_storage_thread, to_end_in_storage_thread
from millstream.services.repository.disk import FileLock
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings, settings_of
from millstream.services.wire.records import State

log = logging.getLogger("millstream.repository")

LOAD_LOCK_S_MAX = 600.0
LOAD_LOCK_PAUSE_S = 0.05
#: a version that is ready in a worker counts as loaded after this time, even without a reply from it
ANSWERS_S_MAX = 5.0
ANSWERS_PAUSE_S = 0.02
#: failures that the caller, or the owner of the folder, can correct
_CALLER_ERRORS = {Code.INVALID, Code.NOT_FOUND, Code.MODEL}
#: the ensembles for whose steps the current task loads a model
_LOADING: ContextVar[tuple[str, ...]] = ContextVar("LOADING", default=())
READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"
_STANDBY = "on standby: its first call loads it"
_BEING_LOADED = {State.LOADING, State.WARMING}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A version in the index of the model repository, or a model without versions."""

    name: str
    version: str = ""  # "" for a model that was never loaded
    state: str = ""  # READY, UNAVAILABLE, LOADING, UNLOADING; "" for a model that was never loaded
    reason: str = ""


HaveLoaded = Callable[[Manifest, float], Awaitable[None]]


Uploading = Callable[[str, int], AbstractAsyncContextManager[object]]


def _unlimited(_model: str, _size_bytes: int) -> AbstractAsyncContextManager[object]:
    return nullcontext()


async def _serves(_manifest: Manifest, _seconds_max: float) -> None:
    """Do nothing: the version serves."""


class RepositoryLoader:
    """Loads, unloads and lists models.

    Args:
        repository: Holds the models.
        catalog: The catalog of this gateway.
        settings: Name the model repositories that are served in place.
        waiter: Waits for workers; None: a ReadyWaiter with its defaults.
        answering: Returns whether this gateway reports the version with a content id as ready.
        have_loaded: Returns when a worker has a version that serves ready, within so many seconds. Raises Failure.
        uploading: Counts a load with so many bytes of files of its own while its block runs. Raises Failure.
    """

    def __init__(
        self,
        repository: FolderRepository,
        catalog: Catalog,
        settings: Settings,
        waiter: ReadyWaiter | None = None,
        answering: Callable[[str], bool] = lambda _content_id: True,
        have_loaded: HaveLoaded = _serves,
        uploading: Uploading = _unlimited,
    ) -> None:
        self._answering = answering
        self._have_loaded = have_loaded
        self._uploading = uploading
        self._repository = repository
        self._catalog = catalog
        self._settings = settings
        self._model_repositories = ModelRepositories(settings_of(settings, TritonSettings).triton_repository_dirs)
        self._changes = LoadChanges(repository)
        self._sources = VersionSources(repository, self._changes, settings.upload_bytes_max)
        self._waiter = waiter or ReadyWaiter(catalog)
        self._loading: Counter[str] = Counter()

    async def start(self) -> None:
        """Abort the staged loads of gateways that died."""
        for model in await asyncio.to_thread(self._repository.staged.models):
            lock = await in_storage_thread(self._repository.staged.lock, model)
            if lock is not None:
                lock.release()

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """Return every model and version that the caller may know of; with `ready`, only those that answer requests."""
        entries = index_entries(self._catalog.snapshot, self._model_repositories.names(), +self._loading)
        known = frozenset(shown({entry.name for entry in entries}))
        return [one for one in entries if one.name in known and (one.state == READY or not ready)]

    async def load(
        self, model: str, config: str | None, files: Mapping[str, bytes], *, retry: bool = True
    ) -> list[int]:
        """Load or reload a model, and return its versions, ascending, when they serve.

        On Failure, the versions that served before still serve.

        Args:
            model: Name of the model.
            config: A ModelConfig as JSON text, in place of the model's own.
            files: Content by path below the model's folder, in place of the model's own files.
            retry: Whether to try again versions that workers refuse to load, and to load those on standby, because an
            operator asks for it.
        """
        try:
            folder = await asyncio.to_thread(self._find_folder, model, files)
            async with AsyncExitStack() as held:
                if files:
                    await held.enter_async_context(self._uploading(model, sum(map(len, files.values()))))
                await held.enter_async_context(self._locked(model))
                try:
                    versions = await self._load(model, folder, config, files, retry=retry)
                except Failure as failure:
                    if folder is not None and failure.code is not Code.NOT_FOUND:  # else it was deleted meanwhile
                        await self._note_failure(model, folder, _load_failure(model, failure).message)
                    raise
        except Failure as failure:
            reply = _load_failure(model, failure)
            log.warning("%s", reply.message, extra=about(model, code=failure.code.value))
            raise reply from failure
        await asyncio.create_task(self._reload_ensembles(model))  # in a context of its own
        return versions

    async def unload(self, model: str, *, steps: bool = False) -> None:
        """Stop serving a model. Nothing is deleted, and an unknown model is no error.

        `steps`: also the models that it runs as an ensemble, unless others run them, too.
        """
        try:
            check_name(model)
        except Failure:
            return
        for step in self._steps_alone(model) if steps else ():
            await self.unload(step, steps=True)
        await to_end_in_storage_thread(self._changes.unload, model)
        await self._catalog.announce(model)
        audit("unloaded", model)

    def _steps_alone(self, model: str) -> set[str]:
        """Return the models that loaded versions of an ensemble run, and no other model's."""

        def run_by(view: ModelView) -> set[str]:
            return {part.model for one in view.versions.values() if one.loaded for part in one.manifest.parts}

        models = self._catalog.snapshot.models
        others = {name for other, view in models.items() if other != model for name in run_by(view)}
        return run_by(models[model]) - others if model in models else set()

    def _find_folder(self, model: str, files: Mapping[str, bytes]) -> Path | None:
        """Return the model repository in place that has the model, or None. Raises Failure(NOT_FOUND) if unknown."""
        folder = self._model_repositories.find(model)
        if folder is not None:
            return folder
        endpoint = self._changes.endpoint(model)
        if endpoint is None and not files:
            known = {*self._catalog.snapshot.models, *self._model_repositories.names()}
            raise Failure(Code.NOT_FOUND, did_you_mean(model, shown(known)).removeprefix("; "))
        # Its files are elsewhere; what was published only names them.
        if endpoint is not None and endpoint.source is not None:
            raise Failure(Code.NOT_FOUND, f"{Path(endpoint.source) / model} is no folder of a served repository now")
        return None

    @asynccontextmanager
    async def _locked(self, model: str) -> AsyncIterator[None]:
        """Hold the lock that allows one load of a model at a time, over all gateways."""
        deadline = time.monotonic() + LOAD_LOCK_S_MAX
        while (lock := await self._lock(model)) is None:
            if time.monotonic() > deadline:
                raise Failure(Code.UNAVAILABLE, "another load of the model takes too long: try again", retry_after_s=5)
            await asyncio.sleep(LOAD_LOCK_PAUSE_S)
        self._loading[model] += 1
        try:
            yield
        finally:
            self._loading[model] -= 1
            lock.release()

    async def _lock(self, model: str) -> FileLock | None:
        taking = asyncio.ensure_future(in_storage_thread(self._repository.staged.lock, model))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_release)  # no task is left to release the lock
            raise

    async def _load(
        self, model: str, folder: Path | None, config: str | None, files: Mapping[str, bytes], *, retry: bool
    ) -> list[int]:
        source = await self._sources.find(model, folder, from_json(config) if config is not None else None, files)
        manifests = list(source.unchanged)
        try:
            if files and any(is_python_model(candidate.served) for candidate in source.candidates):
                check_right_to_serve_code(self._settings, PythonModelImporter())
            await self._load_steps(model, source.config, retry=retry)
            manifests += [await self._manifest(candidate, source.config) for candidate in source.candidates]
            if retry:
                manifests = await to_end_in_storage_thread(
                    self._changes.try_again, manifests, self._waiter.failed(manifests)
                )
            await self._waiter.wait_unloaded(await to_end_in_storage_thread(self._changes.unloaded, model, manifests))
            served = await to_end_in_storage_thread(self._changes.stage, model, manifests)
            for manifest in served if retry else ():
                await self._have_loaded(manifest, READY_S_MAX)  # it may be on standby
            failed = await self._waiter.wait_ready(
                manifests, self._repository.staged.check_kept, all_required=not source.unchanged
            )
            await to_end_in_storage_thread(self._changes.commit, model, manifests, source.folder, owner_name())
        except BaseException:
            await to_end_in_storage_thread(self._repository.staged.abort, model)
            raise
        await self._catalog.announce(model)
        serving = [manifest for manifest in manifests if manifest.version not in failed]
        await self._wait_answering(serving)
        versions = sorted(manifest.version for manifest in serving)
        audit("loaded", model, versions=" ".join(map(str, versions)))
        return versions

    async def _load_steps(self, model: str, config: ParsedConfig | None, *, retry: bool) -> None:
        """Load the models that an ensemble runs and that do not serve yet, as Triton does. Raises Failure."""
        if config is not None and is_ensemble(config):
            check_ensemble(config, model)
        for step in models_of_steps(config):
            chain = (*_LOADING.get(), model)
            if step in chain:
                circle = " -> ".join((chain[chain.index(step)], "...", model, step))
                raise Failure(Code.INVALID, f"circular dependency between ensembles: {circle}")
            view = self._catalog.snapshot.models.get(step)
            if view is None or view.serving is None:
                await self._load_step(model, step, chain, retry=retry)

    async def _load_step(self, model: str, step: str, chain: tuple[str, ...], *, retry: bool) -> None:
        token = _LOADING.set(chain)
        try:
            await self.load(step, None, {}, retry=retry)
        except Failure as failure:
            if "circular dependency" in failure.message:
                raise Failure(Code.INVALID, failure.message.partition(": ")[2]) from None
            if failure.code is Code.NOT_FOUND or not await asyncio.to_thread(self._model_repositories.find, step):
                what = f"ensemble {model} contains models that are not available or ambiguous: {step}"
                raise Failure(Code.INVALID, what) from None
            raise Failure(
                Code.INVALID,
                f"ensemble '{model}' depends on '{step}' which has no loaded version. Model '{step}' loading failed "
                f"with error: {failure.message}",
            ) from None
        finally:
            _LOADING.reset(token)

    async def _reload_ensembles(self, model: str) -> None:
        """Have the ensembles in place that run a model follow its new versions, whoever loaded these."""
        CALLER.set(None)
        models = self._catalog.snapshot.models
        for name, view in models.items():
            stale = any(
                one.loaded
                and not is_current(models, one.manifest)
                and any(p.model == model for p in one.manifest.parts)
                for one in view.versions.values()
            )
            if stale and view.source is not None and name not in _LOADING.get():
                with suppress(Failure):  # it was logged, and the page of the ensemble says it
                    await self.load(name, None, {}, retry=False)

    async def _wait_answering(self, manifests: Sequence[Manifest]) -> None:
        """Wait until this gateway answers for all versions, but at most ANSWERS_S_MAX."""
        until = time.monotonic() + ANSWERS_S_MAX
        while not all(self._answering(manifest.content_id) for manifest in manifests) and time.monotonic() < until:
            await asyncio.sleep(ANSWERS_PAUSE_S)

    async def _manifest(self, candidate: Candidate, config: ParsedConfig | None) -> Manifest:
        assert config is not None
        if is_ensemble(config):
            return ensemble_manifest(candidate, config, self._catalog.snapshot)
        try:
            return await manifest_of(candidate, config, self._settings)
        except Failure as failure:
            raise Failure(
                failure.code, f"version {candidate.version}: {failure.message}", subject=Subject.VERSION
            ) from failure

    async def _note_failure(self, model: str, folder: Path, message: str) -> None:
        with suppress(Failure):
            await to_end_in_storage_thread(self._changes.note_failure, model, folder, message)
            await self._catalog.announce(model)


def _load_failure(model: str, failure: Failure) -> Failure:
    """Return `failure` in the reference server's words, which clients compare."""
    start = f"failed to load '{model[:80]}', "
    reason = failure.message
    if failure.subject is not Subject.VERSION:
        reason = "failed to poll from model repository" + (f": {reason}" if reason else "")
    code = Code.INVALID if failure.code in _CALLER_ERRORS else failure.code
    return Failure(code, start + reason, retry_after_s=failure.retry_after_s)


def _release(taking: asyncio.Future[FileLock | None]) -> None:
    lock = None if taking.cancelled() or taking.exception() else taking.result()
    if lock is not None:
        lock.release()


def index_entries(snapshot: Snapshot, names: Collection[str], loading: Collection[str]) -> list[IndexEntry]:
    """Return the entries of the index.

    Args:
        snapshot: The published versions.
        names: Names of the models in repositories that are served in place, loaded or not.
        loading: Names of the models that are being loaded.
    """
    being_loaded = {
        (instance.model, instance.version)
        for worker in snapshot.workers
        for instance in worker.instances
        if instance.state in _BEING_LOADED
    }
    index: list[IndexEntry] = []
    for name in sorted({*snapshot.models, *names, *loading}):
        view = snapshot.models.get(name)
        of_model = list(_entries_of(view, being_loaded)) if view is not None else []
        if of_model:
            index += of_model
        elif name in loading:
            index.append(IndexEntry(name, "", LOADING))
        else:
            index.append(IndexEntry(name))
    return index


def _entries_of(model: ModelView, being_loaded: Collection[tuple[str, int]]) -> Iterator[IndexEntry]:
    for number, view in sorted(model.versions.items()):
        state, reason = _state(view)
        if state == UNAVAILABLE and (model.name, number) in being_loaded:
            state, reason = LOADING, ""
        yield IndexEntry(model.name, str(number), state, reason or model.failure)
    if not model.versions and model.failure:
        yield IndexEntry(model.name, "", UNAVAILABLE, model.failure)


def _state(view: VersionView) -> tuple[str, str]:
    if not view.loaded:
        return (UNLOADING if view.replicas else UNAVAILABLE), "unloaded"
    if view.available:  # clients of the index send no request to a model that is not READY
        return READY, _STANDBY if view.state is State.STANDBY else view.reason or ""
    return (UNAVAILABLE if view.state is State.FAILED else LOADING), view.reason or ""
