"""Receives an upload, checks it and publishes it as a model version.

chunks ─> staging/upload + sha256 ─> digest as expected? ─> checker process ─> manifest ─> published by one rename
A model of another framework is converted between two checks: the first recognises it, the second checks what is served.
Nothing is visible before the rename. An upload that ends early, by an error or by cancellation, leaves no files.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, TracebackType
from typing import IO, Any, NamedTuple, Self

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.archive import keep_only
from millstream.services.ingest.check_process import check, check_slot, examine
from millstream.services.ingest.importers import (
    IMPORTED,
    LABELS,
    SOURCE,
    Importer,
    ImportOptions,
    Source,
    importers,
    read_inputs,
)
from millstream.services.ingest.report import UPLOAD, CheckedModel, CheckTask, Converted, Recognised, Served, one_line
from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.model.names import check_name, check_version
from millstream.services.model.preparation import check_preparation
from millstream.services.model.signature import TensorSpec
from millstream.services.model.usage import TOKENIZER
from millstream.services.model.version_files import check_labels, describe_file
from millstream.services.model.warmup_inputs import check_warmups
from millstream.services.plugin.registry import contributions
from millstream.services.process.threads import to_end_in_storage_thread
from millstream.services.repository.disk import check_space, storage_errors, tree_bytes
from millstream.services.repository.endpoint_changes import activate_version, retry_on_conflict
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.staging import Staging
from millstream.services.settings import Settings
from millstream.services.wire.records import State

PIECE_BYTES = 1 << 20
#: Kept in the version: it documents how the author meant the model to be served.
_CONFIG = "source/config.pbtxt"
#: The gateway tokenizes texts with it (OpenAI embeddings). The model does not read it, but it belongs to the version.
_TOKENIZER = f"{SOURCE}/{TOKENIZER}"
_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


async def _ignore_state(_: State) -> None:
    return


class Published(NamedTuple):
    """The version of an upload. `new`: whether the upload made it; otherwise it was this upload already."""

    manifest: Manifest
    new: bool


class _PublishedMeanwhile(Exception):
    """Another upload has published the same version."""


class ModelUpload:
    """An upload while its bytes arrive. Use with `async with`: leaving the block without `publish` removes all files.

    `config`, `options` for its import, `url`, from which it comes, `owner` of a new model, `admit`, which refuses a
    version by its bytes, `take`, which refuses the models of an importer and what they ask for, `gather`, which puts
    beside a checked upload what one model is made of, and `reusable`, which says whether a version may stand for an
    upload of the same bytes, may be replaced until `publish`. Entering the block raises Failure: INVALID (bad model
    name or version number), CONFLICT (the version exists, and its digest is not the expected one).

    Args:
        version: the version's number; None takes the next free one.
        digest: the expected sha256 of the upload (64 hexadecimal digits); None: it is not known.
    """

    def __init__(
        self,
        repository: FolderRepository,
        settings: Settings,
        model: str,
        version: int | None,
        config: ModelConfig,
        digest: str | None = None,
    ) -> None:
        self._repository = repository
        self._settings = settings
        self._model = check_name(model)
        self._version = check_version(version) if version is not None else None
        self.config = config
        self.options = ImportOptions()
        self.url: str | None = None
        self.owner = ""
        self.admit: Callable[[int], None] = lambda _: None
        self.take: Callable[[Importer, frozenset[str]], None] = lambda *_: None
        self.gather: Callable[[CheckedModel], bool] = lambda _: False
        self.reusable: Callable[[Manifest], bool] = lambda _: True
        self._digest = _plain(digest)
        self._seen: Collection[int] = ()  # versions that were looked at and are not this upload
        self._staging: Staging | None = None
        self._sink: _Sink | None = None
        self._buffer = bytearray()
        self._size_bytes = 0
        self._triton: dict[str, Any] = {}  # of the manifest

    async def __aenter__(self) -> Self:
        try:
            await to_end_in_storage_thread(self._open)
        except BaseException:
            await to_end_in_storage_thread(self._close)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await to_end_in_storage_thread(self._close)

    async def write(self, chunk: bytes) -> None:
        """Write the next bytes of the upload. Raises Failure: TOO_LARGE, STORAGE."""
        self._size_bytes += len(chunk)
        if self._size_bytes > self._settings.upload_bytes_max:
            raise Failure(
                Code.TOO_LARGE,
                f"the upload is larger than {self._settings.upload_bytes_max} bytes (MILLSTREAM_UPLOAD_BYTES_MAX)",
            )
        self._buffer += chunk
        if len(self._buffer) >= PIECE_BYTES:
            await self._flush()

    async def publish(
        self,
        on_state: Callable[[State], Awaitable[None]] = _ignore_state,
        *,
        activate: bool = False,
        accept: Callable[[CheckedModel | None], CheckedModel | None] = lambda checked: checked,
    ) -> Published:
        """Check the uploaded model and publish it as a version; a version that is this upload already stands for it.

        Args:
            on_state: awaited with each state that the upload reaches.
            activate: make the version the active one.
            accept: returns what to publish of a checked model, or raises Failure; None: a version stands for it.

        Raises:
            Failure: INVALID (the model is rejected, or the digest differs), CONFLICT (the version exists), STORAGE.
        """
        for pool in self.config.pools:
            check_name(pool, "pool name")
        if not self._size_bytes:
            raise invalid("the upload is empty: send the model file as the body")
        await self._flush()
        assert self._sink
        actual = await to_end_in_storage_thread(self._sink.close)
        if self._digest not in {None, actual}:
            raise invalid(
                f"the upload's sha256 is {actual}, not {self._digest}: it was damaged in transit, send it again"
            )
        existing = await to_end_in_storage_thread(self._reuse, actual, activate, partial(accept, None))
        if existing is not None:
            return Published(existing, new=False)
        await on_state(State.PENDING)
        async with check_slot():
            await on_state(State.CHECKING)
            checked = await self._check()
        checked = accept(checked) or checked
        if await to_end_in_storage_thread(self.gather, checked):
            checked = await self._as_one(checked)
        return await to_end_in_storage_thread(self._publish, checked, actual, activate)

    def _reuse(self, digest: str, activate: bool, accept: Callable[[], object]) -> Manifest | None:
        """Return the newest version that is this upload already, which is activated if asked for; None: there is none.

        Raises Failure(CONFLICT) if the upload's number belongs to another version.
        """
        numbers = self._numbers()
        self._seen = frozenset(numbers)
        for manifest in self._same_versions(digest, numbers):
            accept()
            try:
                if activate:
                    activate_version(self._repository, self._model, manifest.version)
            except Failure as failure:
                if failure.code is not Code.NOT_FOUND:  # else it was deleted meanwhile
                    raise
                continue
            return manifest
        self._reject_existing()
        return None

    def _numbers(self) -> list[int]:
        """Return the versions that may stand for the upload: of an upload with a number, the version of this number."""
        numbers = self._repository.versions(self._model)
        return [number for number in reversed(numbers) if self._version in {None, number}]

    def _same_versions(self, digest: str, numbers: Iterable[int]) -> Iterator[Manifest]:
        """Yield those versions that have the upload's bytes, its configuration, and the inputs that it declares."""
        declared = tuple(TensorSpec(**one._asdict()) for one in read_inputs(self.options.inputs))
        for number in numbers:
            try:
                manifest = self._repository.staged.original(self._model, number)
                manifest = manifest or self._repository.manifest(self._model, number)
            except Failure:  # deleted, or damaged
                continue
            same = manifest.digest == digest and _as_given(manifest.config) == _as_given(self.config)
            if same and (not declared or manifest.signature.inputs == declared) and self.reusable(manifest):
                yield manifest

    def _open(self) -> None:
        self._reject_model_in_place()
        if self._digest is not None and not any(self._same_versions(self._digest, self._numbers())):
            self._reject_existing()
        self._staging = self._repository.open_staging()
        self._check_space()
        self._sink = _Sink(self._staging.path / UPLOAD)

    def _reject_existing(self) -> None:
        if self._version is not None and self._version in self._repository.versions(self._model):
            raise Failure(
                Code.CONFLICT,
                f"version {self._version} of model {self._model!r} already exists, is another one, and versions are "
                "immutable: use another number, or delete it first",
            )

    def _reject_model_in_place(self) -> None:
        try:
            source = self._repository.endpoint(self._model).source
        except Failure as failure:
            if failure.code is not Code.NOT_FOUND:
                raise
            return
        if source is not None:
            raise Failure(
                Code.CONFLICT,
                f"model {self._model!r} is served from {source}: change it there and reload, or use another name",
            )

    def _close(self) -> None:
        if self._sink is not None:
            with suppress(Failure):  # a write error of a full disk no longer matters: the file is deleted next
                self._sink.close()
        if self._staging is not None:
            self._staging.__exit__(None, None, None)

    async def _flush(self) -> None:
        piece, self._buffer = self._buffer, bytearray()
        await to_end_in_storage_thread(self._write, piece)

    def _write(self, piece: bytearray) -> None:
        assert self._sink
        self._check_space()
        self._sink.write(piece)

    def _check_space(self) -> None:
        with storage_errors(self.folder()):
            check_space(self.folder())

    def folder(self) -> Path:
        """Return the staging folder of its files. Only within the block."""
        assert self._staging
        return self._staging.path

    async def _check(self) -> CheckedModel:
        task = self._task()
        outcome = await examine(task, self._settings.check_s_max)
        for check_files in contributions("upload_checks", FunctionType):
            await check_files(self.folder() / SOURCE)
        if isinstance(outcome, CheckedModel):
            return outcome
        await to_end_in_storage_thread(self._check_space)  # a conversion writes the model again
        importer = importers()[outcome.importer]
        source = Source(self.folder(), self.folder() / outcome.path)
        self.take(importer, await to_end_in_storage_thread(importer.asks, source))
        given = self.config
        try:
            return await self._import(importer, outcome, task)
        except Failure as refused:
            self.config = given
            other = await to_end_in_storage_thread(self._stand_in, importer, outcome, refused)
            try:
                return await self._import(
                    other, outcome, task, (f"Served as it is, by {other.name}: {refused.message}",)
                )
            except Failure as failure:
                message = f"{refused.message}; nor can it be served as it is, by {other.name}: {failure.message}"
                raise Failure(failure.code, message) from failure

    def _stand_in(self, importer: Importer, outcome: Recognised, refused: Failure) -> Importer:
        """Return the importer that serves what `importer` refused. Raises `refused` if there is none, FORBIDDEN."""
        source = Source(self.folder(), self.folder() / outcome.path)
        other = next((one for one in importers().values() if importer.name in one.stands_in_for), None)
        needed = None if other is None else other.stands_in(source, self.options)
        if refused.code is not Code.INVALID or other is None or needed is None:
            raise refused
        if needed:
            raise invalid(f"{refused.message}; {needed}")
        try:
            self.take(other, other.asks(source))
        except Failure as failure:
            raise invalid(f"{refused.message}; it could be served as it is, but {failure.message}") from failure
        shutil.rmtree(self.folder() / IMPORTED, ignore_errors=True)
        return other

    async def _import(
        self, importer: Importer, outcome: Recognised, task: CheckTask, notes: tuple[str, ...] = ()
    ) -> CheckedModel:
        converted = await importer.run(self.folder(), outcome, self.options, self._settings)
        if isinstance(converted, Served):
            given = {name: getattr(self.config, name) for name in self.config.model_fields_set}
            self.config, self._triton = converted.config.model_copy(update=given), converted.triton
            return converted.checked.model_copy(update={"notes": (*outcome.notes, *converted.checked.notes)})
        if converted.classes is not None and self.config.classes is None:
            labels = {converted.classes.output: LABELS, **self.config.labels}
            self.config = self.config.model_copy(update={"classes": converted.classes, "labels": labels})
        checked = await check(task.model_copy(update={"imported": converted}), self._settings.check_s_max)
        notes = (*outcome.notes, *map(one_line, notes))
        return await to_end_in_storage_thread(_with_sources, self.folder(), checked, converted, notes)

    async def _as_one(self, checked: CheckedModel) -> CheckedModel:
        """Return the one model that the check makes of a composed upload, or `checked`, with a note on why not."""
        facts = {"importer": "", "producer": "", "rtol": 0, "atol": 0, "samples": ()}
        upload = Converted(served=checked.sources[0], source_format=checked.source_format, **facts)
        try:
            async with check_slot():
                one = await check(self._task().model_copy(update={"imported": upload}), self._settings.check_s_max)
            if one.signature != checked.signature:
                raise invalid("one model would have another signature")
        except Failure as failure:
            if failure.code is not Code.INVALID or not (self.folder() / checked.served).exists():
                raise
            return checked.model_copy(
                update={"notes": (*checked.notes, one_line(f"Its steps stay apart: {failure.message}"))}
            )
        return one.model_copy(update={"sources": checked.sources, "merged": checked.parts})

    def _task(self) -> CheckTask:
        return CheckTask(
            folder=self.folder(),
            batching=self.config.batching,
            rows_max=self.config.rows_max,
            warmup=self.config.warmup,
            unpacked_bytes_max=self._settings.upload_bytes_max,
            memory_bytes_max=self._settings.check_memory_bytes_max,
            cpu_s_max=int(self._settings.check_s_max) + 1,
        )

    def _publish(self, checked: CheckedModel, digest: str, activate: bool) -> Published:
        assert self._staging
        self.config = self.config.model_copy(update={"labels": checked.labels | self.config.labels})
        config_files = check_warmups(self.config, checked.signature, self.folder())
        config_files += check_labels(self.config, checked.signature, self.folder())
        for prepare in (self.config.prepare, checked.imported.prepare if checked.imported is not None else {}):
            check_preparation(prepare, checked.signature)
        with storage_errors(self.folder()):
            self._lift((checked.sources or ("",))[0], _TOKENIZER, _CONFIG)
            config_files += self._if_present(_TOKENIZER)
            keep_only(self.folder(), {*checked.files, *checked.sources, *config_files, *self._if_present(_CONFIG)})
            files = tuple(describe_file(self.folder(), path) for path in dict.fromkeys((*checked.files, *config_files)))
        self.admit(tree_bytes(self.folder()))
        staging = self._staging

        def check() -> None:
            unseen = [number for number in self._numbers() if number not in self._seen]
            if self._version is None and any(self._same_versions(digest, unseen)):
                raise _PublishedMeanwhile

        def publish() -> Published:
            version = self._version or self._repository.next_version(self._model)
            manifest = self._manifest(version, checked, digest, files)
            try:
                self._repository.publish(staging, manifest, activate=activate, owner=self.owner, check=check)
            except Failure as failure:
                if failure.code is Code.CONFLICT and self._version is not None:
                    existing = self._reuse(digest, activate, lambda: None)
                    if existing is not None:
                        return Published(existing, new=False)
                raise
            except _PublishedMeanwhile:
                existing = self._reuse(digest, activate, lambda: None)
                return Published(existing, new=False) if existing is not None else publish()  # it was deleted since
            return Published(manifest, new=True)

        # Without a number of its own, an upload takes the next one when another upload has published this one first.
        return publish() if self._version is not None else retry_on_conflict(publish)

    def _lift(self, model: str, *names: str) -> None:
        """Move files up that are in the folder of the model, or in one above it, to the top of an archive."""
        source = self.folder() / SOURCE
        for folder in (self.folder() / model).parents:
            if source not in folder.parents:
                return
            for path in (self.folder() / name for name in names):
                beside = folder / path.name
                if beside.is_file() and not beside.is_symlink() and not path.exists():
                    beside.rename(path)

    def _if_present(self, name: str) -> list[str]:
        """Return `[name]` if the upload has a regular file of this name, else an empty list."""
        path = self.folder() / name
        return [name] if path.is_file() and not path.is_symlink() else []

    def _manifest(self, version: int, checked: CheckedModel, digest: str, files: tuple[SourceFile, ...]) -> Manifest:
        return Manifest(
            model=self._model,
            version=version,
            created=time.time(),  # noqa: TID251 - shown to users, never compared
            digest=digest,
            source_format=checked.source_format,
            served=checked.served,
            files=files,
            signature=checked.signature,
            config=self.config,
            opset=checked.opset,
            ir_version=checked.ir_version,
            producer=checked.producer,
            batching=checked.batching,
            notes=checked.notes,
            trial=checked.trial,
            index_ranges=checked.index_ranges,
            imported=checked.imported,
            url=self.url,
            triton=self._triton,
            parts=checked.parts,
            options=checked.options,
            merged=checked.merged,
            streams=checked.streams,
        )


def _as_given(config: ModelConfig) -> ModelConfig:
    """Return the configuration without what the check added: labels in files that it wrote, and their classes."""
    labels = {output: path for output, path in config.labels.items() if path.startswith(f"{SOURCE}/")}
    classes = config.classes if config.classes is not None and config.classes.output in labels else None
    return config.model_copy(update={"labels": labels, "classes": classes})


def _with_sources(folder: Path, checked: CheckedModel, converted: Converted, notes: Sequence[str]) -> CheckedModel:
    """Return the checked model with all notes, and all files that its version keeps: of the import, and uploaded."""
    uploaded = tuple(
        str(path.relative_to(folder))
        for path in sorted((folder / SOURCE).rglob("*"))
        if path.is_file() and not path.is_symlink()
    )
    samples = checked.imported.samples if checked.imported else None
    return checked.model_copy(
        update={
            "files": tuple(dict.fromkeys((*checked.files, *converted.files))),
            "sources": (*checked.sources, *uploaded, *([samples] if samples else [])),
            "notes": (*notes, *converted.notes, *checked.notes),
        }
    )


class _Sink:
    """A new file that is hashed while it is written. Blocking: call it from threads, one call at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        with storage_errors(path.parent):
            self._file: IO[bytes] = path.open("xb", buffering=0)

    def write(self, piece: bytes | bytearray) -> None:
        self._hash.update(piece)
        rest = memoryview(piece)
        with storage_errors(self._path.parent):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> str:
        """Close the file and return the sha256 (hex) of its content."""
        with storage_errors(self._path.parent):
            self._file.close()
        return self._hash.hexdigest()


def _plain(digest: str | None) -> str | None:
    if digest is None:
        return None
    match = _SHA256.fullmatch(digest.strip().lower())
    if match is None:
        raise invalid(f"{digest[:80]!r} is not a sha256 digest: send 64 hexadecimal digits")
    return match[1]
