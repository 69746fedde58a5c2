"""An upload on its way into the repository.

chunks ─> staging/upload + sha256 ─> digest as expected? ─> checker process ─> manifest ─> published by one rename
Until the rename nothing of it is visible; leaving early at any point, cancellation included, removes it all.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.check_process import check
from millstream.services.ingest.check_slots import turn
from millstream.services.ingest.digests import described_file
from millstream.services.ingest.needed_files import keep_only
from millstream.services.ingest.report import UPLOAD, Checked, CheckTask
from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.model.names import check_name, check_version
from millstream.services.model.version_files import check_labels
from millstream.services.model.warmup_check import check_warmups
from millstream.services.process.uninterruptible import uninterrupted
from millstream.services.repository.base import Repository, Staging
from millstream.services.repository.disk import storage_errors
from millstream.services.settings import Settings
from millstream.services.wire.records import State

PIECE_BYTES = 1 << 20
#: kept, as it says how the model was meant to be served
_CONFIG = "source/config.pbtxt"
#: What the gateway tokenizes texts with (OpenAI's embeddings); it is no file of the model, but one of the version's.
_TOKENIZER = "source/tokenizer.json"
_NUMBER_TRIES_MAX = 100
_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_Result = TypeVar("_Result")


class Incoming:
    """An upload while its bytes arrive. Use with `async with`; leaving without `publish` removes everything.

    `version`: None takes the next number. `config` may be replaced until `publish`. Entering raises Failure: INVALID (names), CONFLICT (the version is there).
    """

    def __init__(
        self, repository: Repository, settings: Settings, model: str, version: int | None, config: ModelConfig
    ) -> None:
        self._repository = repository
        self._settings = settings
        self._model = check_name(model)
        self._version = check_version(version) if version is not None else None
        self.config = config
        self._staging: Staging | None = None
        self._sink: _Sink | None = None
        self._buffer = bytearray()
        self._size_bytes = 0

    async def __aenter__(self) -> Self:
        try:
            await _to_its_end(self._open)
        except BaseException:
            await _to_its_end(self._close)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _to_its_end(self._close)

    async def write(self, chunk: bytes) -> None:
        """Take the next bytes of the upload. Raises Failure: TOO_LARGE, STORAGE."""
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
        digest: str | None,
        on_state: Callable[[State], Awaitable[None]] | None = None,
        *,
        activate: bool = False,
    ) -> Manifest:
        """Check what arrived and make it a version; `activate`: the active one. `digest`: the sha256 (hex) expected.

        Raises Failure: INVALID (the model, or the digest differs), CONFLICT (the version is there), STORAGE.
        """
        tell = on_state or _nobody
        check_name(self.config.pool, "pool name")
        if not self._size_bytes:
            raise invalid("the upload is empty: send the model file as the body")
        await self._flush()
        actual = await _to_its_end(self._opened_sink().close)
        _compare(actual, digest)
        await tell(State.UPLOADED)
        async with turn():
            await tell(State.CHECKING)
            checked = await check(self._task(), self._settings.check_s_max)
        return await _to_its_end(self._publish, checked, actual, activate)

    def _open(self) -> None:
        self._refuse_in_place()
        if self._version is not None and self._version in self._repository.versions(self._model):
            raise Failure(
                Code.CONFLICT,
                f"version {self._version} of model {self._model!r} is already there and versions are immutable: "
                "use another number, or delete it first",
            )
        self._staging = self._repository.stage()
        self._sink = _Sink(self._staging.path / UPLOAD)

    def _refuse_in_place(self) -> None:
        try:
            source = self._repository.endpoint(self._model).source
        except Failure as failure:
            if failure.code is not Code.NOT_FOUND:
                raise
            return
        if source is not None:
            raise Failure(
                Code.CONFLICT,
                f"model {self._model!r} is served from {source}: change it there and load it again, or use another name",
            )

    def _close(self) -> None:
        if self._sink is not None:
            with suppress(Failure):  # bytes that a full disk did not take are not wanted any more
                self._sink.close()
        if self._staging is not None:
            self._staging.__exit__(None, None, None)

    async def _flush(self) -> None:
        piece, self._buffer = self._buffer, bytearray()
        await _to_its_end(self._opened_sink().write, piece)

    def _opened_sink(self) -> _Sink:
        if self._sink is None:
            raise RuntimeError("Incoming is used outside its `async with` block")
        return self._sink

    def _folder(self) -> Path:
        assert self._staging
        return self._staging.path

    def _task(self) -> CheckTask:
        return CheckTask(
            folder=self._folder(),
            batching=self.config.batching,
            rows_max=self.config.rows_max,
            warmup=self.config.warmup,
            unpacked_bytes_max=self._settings.upload_bytes_max,
            memory_bytes_max=self._settings.check_memory_bytes_max,
            cpu_s_max=int(self._settings.check_s_max) + 1,
        )

    def _publish(self, checked: Checked, digest: str, activate: bool) -> Manifest:
        assert self._staging
        named = check_warmups(self.config, checked.signature, self._folder())
        named += check_labels(self.config, checked.signature, self._folder())
        named += self._found(_TOKENIZER)
        with storage_errors(self._folder()):
            keep_only(self._folder(), {*checked.files, *checked.sources, *named, *self._found(_CONFIG)})
            files = tuple(described_file(self._folder(), path) for path in dict.fromkeys((*checked.files, *named)))
        for attempt in range(1, _NUMBER_TRIES_MAX + 1):
            version = self._version or self._repository.next_version(self._model)
            manifest = self._manifest(version, checked, digest, files)
            try:
                self._repository.publish(self._staging, manifest, activate=activate)
                return manifest
            except Failure as failure:  # the next number was taken by an upload that ended first
                if failure.code is not Code.CONFLICT or self._version is not None or attempt == _NUMBER_TRIES_MAX:
                    raise
        raise AssertionError  # the last attempt returned or raised

    def _found(self, name: str) -> list[str]:
        """`name`, if it is a file of the upload."""
        path = self._folder() / name
        return [name] if path.is_file() and not path.is_symlink() else []

    def _manifest(self, version: int, checked: Checked, digest: str, files: tuple[SourceFile, ...]) -> Manifest:
        return Manifest(
            model=self._model,
            version=version,
            created=time.time(),  # noqa: TID251 - for people
            digest=digest,
            served=checked.served,
            files=files,
            signature=checked.signature,
            config=self.config,
            opset=checked.opset,
            ir_version=checked.ir_version,
            producer=checked.producer,
            batching=checked.batching,
            notes=checked.notes,
        )


class _Sink:
    """A new file that is hashed as it is written. Blocking: used in threads, one call at a time."""

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
        """The sha256 (hex) of all that was written."""
        with storage_errors(self._path.parent):
            self._file.close()
        return self._hash.hexdigest()


async def _to_its_end(work: Callable[..., _Result], *arguments: object) -> _Result:
    """Run blocking `work` in a thread and wait until it is done, even if this task is cancelled meanwhile.

    Otherwise the staging folder would be removed under a thread that still writes to it, or publishes it.
    """
    return await uninterrupted(asyncio.to_thread(work, *arguments))


def _compare(actual: str, expected: str | None) -> None:
    if expected is None:
        return
    match = _SHA256.fullmatch(expected.strip().lower())
    if match is None:
        raise invalid(f"{expected[:80]!r} is not a sha256 digest: send 64 hexadecimal digits")
    if match[1] != actual:
        raise invalid(f"the upload's sha256 is {actual}, not {match[1]}: it was damaged on its way, send it again")


async def _nobody(_: State) -> None:
    """Take a state that no one asked for."""
