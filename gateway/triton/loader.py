"""Loading and unloading: what Triton's clients do with the model repository, for folders in place and for uploads.

load ─> lock ─> read the folder, check, manifests ─> stage ─> ready in a worker ─> commit ─> tell every gateway
                                                              └> anything else ─> abort: nothing has changed
unload ─> the endpoint says that no version is loaded ─> gateways route nothing there, workers let go of it
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from millstream.gateway.catalog.interfaces import ModelCatalog
from millstream.gateway.triton import index
from millstream.gateway.triton.await_ready import Trial
from millstream.gateway.triton.candidates import Candidate, manifest_of
from millstream.gateway.triton.interfaces import IndexEntry
from millstream.services.errors import Code, Failure, Subject, invalid
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.model.names import check_name
from millstream.services.model.paths import plain_path
from millstream.services.process.uninterruptible import uninterrupted
from millstream.services.repository.base import LoadLock, Repository
from millstream.services.repository.conflicts import retry_on_conflict
from millstream.services.repository.disk import storage_errors
from millstream.services.settings import Settings
from millstream.services.triton_config.config import ParsedConfig, from_json
from millstream.services.triton_config.model_folder import check_config, read_model_folder
from millstream.services.triton_config.repositories import ModelRepositories
from millstream.services.triton_config.version_policy import served_versions

log = logging.getLogger("millstream.repository")

LOAD_LOCK_S_MAX = 600.0
LOAD_LOCK_PAUSE_S = 0.05
#: a version that workers hold ready, and whose first reply takes longer, is loaded all the same
ANSWERS_S_MAX = 5.0
ANSWERS_PAUSE_S = 0.02
FILES_MAX = 10_000
#: what a caller, or the owner of the folder, can mend
_THEIRS = {Code.INVALID, Code.NOT_FOUND, Code.MODEL}
_Result = TypeVar("_Result")


class _Source(NamedTuple):
    """Where a model's versions come from. `folder`: of models, None for uploaded and given ones."""

    folder: Path | None
    given: ParsedConfig | None
    candidates: Sequence[Candidate]
    kept: Sequence[Manifest] = ()  # versions that need no check: they serve as they were uploaded


class RepositoryLoader:
    """ports.Control. `folders`: the model repositories that are served in place."""

    def __init__(
        self,
        repository: Repository,
        catalog: ModelCatalog,
        settings: Settings,
        trial: Trial | None = None,
        answering: Callable[[str], bool] = lambda _content_id: True,
    ) -> None:
        """`answering`: whether this gateway says that the version with a content id is ready."""
        self._answering = answering
        self._repository = repository
        self._catalog = catalog
        self._settings = settings
        self._folders = ModelRepositories(settings.triton_repository_dirs)
        self._trial = trial or Trial(catalog)
        self._loading: Counter[str] = Counter()

    async def start(self) -> None:
        """Abort what gateways that died had staged."""
        for model in await asyncio.to_thread(self._repository.staged.models):
            lock = await asyncio.to_thread(self._repository.staged.lock, model)
            if lock is not None:
                lock.release()

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """Every model and version; `ready`: only those that answer."""
        found = index.entries(self._catalog.snapshot, self._folders.names(), +self._loading)
        return [entry for entry in found if entry.state == index.READY] if ready else found

    async def load(self, model: str, config: str | None, files: Mapping[str, bytes], *, retry: bool = True) -> None:
        """Load, or load again; returns when it serves. Raises Failure; what served before goes on then.

        `retry`: an operator asks, so what workers do not load any more is tried again.
        """
        try:
            folder = await asyncio.to_thread(self._known, model, files)
            async with self._locked(model):
                try:
                    await self._load(model, folder, config, files, retry=retry)
                except Failure as failure:
                    if folder is not None:
                        await self._note(model, folder, _load_failure(model, failure).message)
                    raise
        except Failure as failure:
            said = _load_failure(model, failure)
            log.warning("%s", said.message)
            raise said from failure

    async def unload(self, model: str) -> None:
        """Stop serving a model. Nothing is deleted, and an unknown model is no error."""
        try:
            check_name(model)
        except Failure:
            return
        await self._change(model, lambda endpoint: endpoint.model_copy(update={"loaded": ()}))
        await self._catalog.announce(model)
        log.info("unloaded: %s", model)

    def _known(self, model: str, files: Mapping[str, bytes]) -> Path | None:
        """The folder of models that has this one. Raises Failure(NOT_FOUND) where nobody has it, nor comes with it."""
        folder = self._folders.find(model)
        if folder is None and not files and self._endpoint(model) is None:
            raise Failure(Code.NOT_FOUND, "")
        return folder

    @asynccontextmanager
    async def _locked(self, model: str) -> AsyncIterator[None]:
        """One load of a model at a time, in all gateways."""
        deadline = time.monotonic() + LOAD_LOCK_S_MAX
        while (lock := await self._lock(model)) is None:
            if time.monotonic() > deadline:
                raise Failure(Code.UNAVAILABLE, "another load of it takes too long: try again", retry_after_s=5)
            await asyncio.sleep(LOAD_LOCK_PAUSE_S)
        self._loading[model] += 1
        try:
            yield
        finally:
            self._loading[model] -= 1
            lock.release()

    async def _lock(self, model: str) -> LoadLock | None:
        taking = asyncio.ensure_future(asyncio.to_thread(self._repository.staged.lock, model))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(_give_up)  # what nobody waits for any more must not be held for ever
            raise

    async def _load(
        self, model: str, folder: Path | None, config: str | None, files: Mapping[str, bytes], *, retry: bool
    ) -> None:
        given = from_json(config) if config is not None else None
        if files:
            source = await self._from_files(model, given, files, folder)
        elif folder is not None:
            source = await self._from_folder(model, folder, given)
        else:
            source = await _whole(self._from_uploads, model, given)
        manifests = list(source.kept)
        try:
            manifests += [await self._manifest(candidate, source.given) for candidate in source.candidates]
            if retry:
                manifests = await _whole(self._cleared, manifests)
            await self._trial.let_go(await _whole(self._unserved, model, manifests))
            await _whole(self._stage, model, manifests)
            await self._trial.passed(manifests, all_of_them=not source.kept)
            await _whole(self._commit, model, manifests, source.folder)
        except BaseException:
            await _whole(self._repository.staged.abort, model)
            raise
        await self._catalog.announce(model)
        await self._answered(manifests)
        log.info("loaded: %s version %s", model, ", ".join(str(one.version) for one in manifests))

    async def _answered(self, manifests: Sequence[Manifest]) -> None:
        """Return when the versions are ready for whoever asks this gateway next, or it is of no use to wait for that."""
        until = time.monotonic() + ANSWERS_S_MAX
        while not all(self._answering(one.content_id) for one in manifests) and time.monotonic() < until:
            await asyncio.sleep(ANSWERS_PAUSE_S)

    async def _manifest(self, candidate: Candidate, given: ParsedConfig | None) -> Manifest:
        assert given is not None
        try:
            return await manifest_of(candidate, given, self._pool(), self._settings)
        except Failure as failure:
            raise Failure(
                failure.code, f"version {candidate.version}: {failure.message}", subject=Subject.VERSION
            ) from failure

    def _pool(self) -> str:
        """The pool of models that name no kind of device: cpu, if it has a worker."""
        pools = {worker.pool for worker in self._catalog.snapshot.workers}
        return "cpu" if "cpu" in pools or not pools else min(pools)

    async def _from_folder(self, model: str, folder: Path, given: ParsedConfig | None) -> _Source:
        await asyncio.to_thread(self._refuse_uploaded, model)
        return await asyncio.to_thread(self._in_place, model, folder / model, given, folder)

    def _in_place(self, model: str, path: Path, given: ParsedConfig | None, folder: Path | None) -> _Source:
        found = read_model_folder(path, model, given)
        now = self._manifests(model)
        candidates = [
            Candidate(model, version, path, served, str(path), now.get(version))
            for version, served in found.served.items()
        ]
        return _Source(folder, found.parsed, candidates)

    async def _from_files(
        self, model: str, given: ParsedConfig | None, files: Mapping[str, bytes], folder: Path | None
    ) -> _Source:
        if given is None:
            raise invalid("files are given without a config, which must come with them")
        if folder is not None:
            await asyncio.to_thread(self._refuse_uploaded, model)
        path = await _whole(self._keep, model, files)
        try:
            return await asyncio.to_thread(self._in_place, model, path, given, folder)
        except BaseException:
            await _whole(self._repository.staged.abort, model)
            raise

    def _keep(self, model: str, files: Mapping[str, bytes]) -> Path:
        size = sum(map(len, files.values()))
        if size > self._settings.upload_bytes_max:
            raise Failure(Code.TOO_LARGE, f"the files have more than {self._settings.upload_bytes_max} bytes")
        if len(files) > FILES_MAX:
            raise invalid(f"more than {FILES_MAX} files are given")
        with self._repository.open_staging() as staging, storage_errors(staging.path):
            for path, content in files.items():
                target = staging.path / plain_path(path, "file")
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
                except (FileExistsError, NotADirectoryError, IsADirectoryError):
                    raise invalid(f"file {path[:80]!a} is both a file and a folder") from None
            return self._repository.staged.add_files(model, staging)

    def _from_uploads(self, model: str, given: ParsedConfig | None) -> _Source:
        """Versions as they were uploaded; with a configuration, those that it chooses, served as it says."""
        staged = self._repository.staged
        known = {version: staged.original(model, version) for version in self._repository.versions(model)}
        uploaded = {version: manifest for version, manifest in known.items() if manifest is not None}
        if not uploaded:
            raise Failure(Code.NOT_FOUND, "")
        if given is None:
            return _Source(None, None, (), tuple(uploaded.values()))
        check_config(given, model)
        versions = tuple(uploaded)
        if given.message.HasField("version_policy"):
            versions = served_versions(given.message, versions)
        now = self._manifests(model)
        return _Source(None, given, [self._uploaded(uploaded[version], now[version]) for version in versions])

    def _uploaded(self, manifest: Manifest, now: Manifest) -> Candidate:
        folder = self._repository.folder_of(manifest)
        return Candidate(
            manifest.model, manifest.version, folder, manifest.served, manifest.origin, now, manifest.digest
        )

    def _refuse_uploaded(self, model: str) -> None:
        endpoint = self._endpoint(model)
        if endpoint is not None and endpoint.source is None and self._repository.versions(model):
            raise Failure(
                Code.INVALID,
                f"a model of this name was uploaded, and goes on: delete it (millstream rm {model}) to serve this one",
            )

    def _manifests(self, model: str) -> dict[int, Manifest]:
        return {version: self._repository.manifest(model, version) for version in self._repository.versions(model)}

    def _endpoint(self, model: str) -> Endpoint | None:
        try:
            return self._repository.endpoint(model)
        except Failure as failure:
            if failure.code is not Code.NOT_FOUND:
                raise
            return None

    def _cleared(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """The manifests without what was held against them; those with new content ids, which no worker has tried."""
        return [
            one.model_copy(update={"created": time.time()}) if self._repository.verdicts.clear(one) else one  # noqa: TID251 - for people
            for one in manifests
        ]

    def _unserved(self, model: str, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Those that are there as they are to be loaded, but are unloaded: workers may still be letting go of them."""
        endpoint, now = self._endpoint(model), self._manifests(model)
        return [
            one for one in manifests if now.get(one.version) == one and endpoint and not endpoint.serves(one.version)
        ]

    def _stage(self, model: str, manifests: Sequence[Manifest]) -> None:
        endpoint, now = self._endpoint(model), self._manifests(model)
        new = [
            one for one in manifests if now.get(one.version) != one or not (endpoint and endpoint.serves(one.version))
        ]
        if new:
            self._repository.staged.stage(new)

    def _commit(self, model: str, manifests: Sequence[Manifest], folder: Path | None) -> None:
        def commit() -> None:
            before = self._endpoint(model) or Endpoint(model=model)
            now = self._manifests(model)
            after, removed = _resolved(before, list(now), [one.version for one in manifests], folder)
            if after != before or any(now.get(one.version) != one for one in manifests) or removed:
                self._repository.staged.commit(after, manifests, removed)

        retry_on_conflict(commit)

    async def _note(self, model: str, folder: Path, message: str) -> None:
        """Keep why a load failed, for every gateway to show."""

        def note(endpoint: Endpoint) -> Endpoint:
            return endpoint.model_copy(update={"failure": message})

        with suppress(Failure):
            await self._change(model, note, Endpoint(model=model, source=str(folder)))
            await self._catalog.announce(model)

    async def _change(
        self, model: str, change: Callable[[Endpoint], Endpoint], missing: Endpoint | None = None
    ) -> None:
        """Replace the endpoint by what `change` makes of it. `missing`: what is changed where there is none."""

        def replace() -> None:
            endpoint = self._endpoint(model) or missing
            changed = change(endpoint) if endpoint else None
            if changed is None or changed == endpoint:
                return
            if self._endpoint(model) is None:
                self._repository.staged.commit(changed, ())
            else:
                self._repository.replace_endpoint(changed)

        await _whole(retry_on_conflict, replace)


def _resolved(
    before: Endpoint, there: Sequence[int], served: Sequence[int], folder: Path | None
) -> tuple[Endpoint, list[int]]:
    """The endpoint when `served` versions serve, and which of those that are there go: uploads stay, unloaded."""
    dropped = [version for version in there if version not in served] if folder is not None else []
    left = {*there, *served} - set(dropped)
    active = before.active if before.active in served and folder is None else max(served)
    update = {
        "active": active,
        "previous": None,
        "loaded": None if left == set(served) else tuple(sorted(served)),
        "source": str(folder) if folder is not None else None,
        "failure": "",
    }
    return before.model_copy(update=update), dropped


def _load_failure(model: str, failure: Failure) -> Failure:
    """In the reference's words, which clients look for."""
    start = f"failed to load '{model[:80]}', "
    said = failure.message
    if failure.subject is not Subject.VERSION:
        said = "failed to poll from model repository" + (f": {said}" if said else "")
    code = Code.INVALID if failure.code in _THEIRS else failure.code
    return Failure(code, start + said, retry_after_s=failure.retry_after_s)


def _give_up(taking: asyncio.Future[LoadLock | None]) -> None:
    lock = None if taking.cancelled() or taking.exception() else taking.result()
    if lock is not None:
        lock.release()


async def _whole(work: Callable[..., _Result], *arguments: object) -> _Result:
    """Blocking `work` in a thread, to its end, even if the caller goes away meanwhile."""
    return await uninterrupted(asyncio.to_thread(work, *arguments))
