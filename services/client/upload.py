"""Uploads of model files and folders: read twice, for the digest and to be sent, and never in memory as a whole.

file ─> its bytes; folder ─> a tar of its files, made while it is sent ─> POST or PUT ─> document of the new version
The tar of a folder has the same bytes each time: sorted names, no times, no owners. Source: POSIX.1-2001 pax (tar).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from millstream.services.client.call import Body, Call, Steps, send
from millstream.services.client.documents import Version
from millstream.services.client.errors import Timeout, VersionFailed, WrongFile
from millstream.services.client.models import admin_path, version, wait
from millstream.services.client.replies import document_of
from millstream.services.client.retry import Budget
from millstream.services.errors import invalid
from millstream.services.importers.base import Source
from millstream.services.importers.registry import find_importer
from millstream.services.ingest.file_kind import PICKLE_REFUSAL, content_head, is_pickle, why_not_onnx

CHUNK_BYTES = 256 << 10
CHECK_S_MAX = 900.0
REPLY_WAIT_S_MAX = 30.0  # proxies give up on a silent reply, often after 60 s; a longer wait asks again
FILES_MAX = 10_000
_SETTLED = {"ready", "standby", "failed", "unloaded"}
_TAR_END = bytes(2 * tarfile.BLOCKSIZE)

#: called with the bytes sent so far and the bytes of the whole upload
Progress = Callable[[int, int], None]


class _Part(NamedTuple):
    """A file, and the bytes around its content in the upload."""

    path: Path
    size_bytes: int
    before: bytes = b""
    after: bytes = b""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The file or folder of an upload. Create it with `open`, which reads everything once."""

    path: Path
    size_bytes: int
    sha256: str
    _parts: Sequence[_Part]
    _end: bytes
    pickled: bool = False

    @classmethod
    def open(cls, path: Path) -> ModelFiles:
        """Read a file or folder. Raises Failure(INVALID) if it is missing, empty, cannot be read, or is no model."""
        try:
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                parts, end = _folder_parts(path), _TAR_END
            elif stat.S_ISREG(mode):
                parts, end = [_Part(path, path.stat().st_size)], b""
            else:
                raise invalid(f"{path}: this is neither a file nor a folder")
            size_bytes = sum(part.size_bytes + len(part.before) + len(part.after) for part in parts) + len(end)
            if size_bytes == len(end):
                raise invalid(f"{path}: the {'folder has no files' if end else 'file is empty'}")
            foreign = find_importer(Source(path.parent, path)) is not None
            why = None if foreign else why_not_onnx(path)
            if why is not None:
                raise WrongFile(f"{path}: {why}")
            digest = hashlib.sha256()
            for chunk in _chunks(parts, end):
                digest.update(chunk)
        except FileNotFoundError as error:
            raise invalid(f"{error.filename or path}: there is no such file") from error
        except (OSError, ValueError) as error:
            raise invalid(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        pickled = foreign and not end and is_pickle(content_head(path))
        return cls(path, size_bytes, digest.hexdigest(), parts, end, pickled)

    def body(self, progress: Progress | None = None) -> Body:
        """Return the body of a request; `progress` is called after each chunk that was sent."""

        def chunks() -> Iterator[bytes]:
            sent = 0
            try:
                for chunk in _chunks(self._parts, self._end):
                    yield chunk
                    sent += len(chunk)
                    if progress is not None:
                        progress(sent, self.size_bytes)
            except OSError as error:
                raise invalid(f"{error.filename or self.path}: {error.strerror or error}") from error

        return Body(self.size_bytes, chunks)


class UploadOptions(NamedTuple):
    """What a caller may say besides the files; `version` None: the next number."""

    version: int | None = None
    config: dict[str, Any] | None = None
    activate: bool = True
    wait_s: float = 0
    allow_pickle: bool = False
    allow_code: bool = False
    inputs: tuple[str, ...] = ()


def push(
    name: str, files: ModelFiles, options: UploadOptions, progress: Progress | None, clock: Callable[[], float]
) -> Steps[Version]:
    """Upload a new version; wait at most `wait_s` seconds until it is ready. Raises VersionFailed if it fails then."""
    if files.pickled and not options.allow_pickle:
        raise WrongFile(f"{files.path}: {PICKLE_REFUSAL}")
    query: dict[str, str | list[str]] = {}
    asked_s = min(options.wait_s, REPLY_WAIT_S_MAX)
    if asked_s:
        query["wait"] = f"{asked_s:g}"
    if not options.activate:
        query["activate"] = "false"
    query |= {option: "true" for option in ("allow_pickle", "allow_code") if getattr(options, option)}
    if options.inputs:
        query["input"] = list(options.inputs)
    if options.config:
        query["config"] = json.dumps(options.config)
    call = Call(
        "POST" if options.version is None else "PUT",
        f"{admin_path(name)}/versions" + ("" if options.version is None else f"/{options.version}"),
        query=query,
        headers={"Content-Type": "application/octet-stream", "X-Content-SHA256": files.sha256},
        content=files.body(progress),
        read_s=CHECK_S_MAX + asked_s,
    )
    document = cast("Version", document_of((yield from send(call)), "version", "state", "reason"))
    if options.wait_s > asked_s and document["state"] not in _SETTLED:
        budget = Budget(options.wait_s - asked_s, clock)
        try:
            document = yield from wait(name, document["version"], budget)
        except Timeout:
            document = yield from version(name, document["version"])
    if document["state"] == "failed":
        raise VersionFailed(name, document["version"], document["reason"] or "no reason is known")
    return document


def _folder_parts(folder: Path) -> list[_Part]:
    parts = []
    for path in sorted(_files(folder)):
        size_bytes = path.stat().st_size
        entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
        entry.size = size_bytes
        padding = bytes(-size_bytes % tarfile.BLOCKSIZE)
        parts.append(_Part(path, size_bytes, entry.tobuf(tarfile.PAX_FORMAT), padding))
        if len(parts) > FILES_MAX:
            raise invalid(f"{folder}: the folder has more than {FILES_MAX} files")
    return parts


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without hidden ones. Links to files are followed, links to folders are not."""
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if name.startswith("."):
                continue
            if not path.is_file():
                raise invalid(f"{path}: this is not a file")
            yield path


def _raise(error: OSError) -> None:
    raise error


def _chunks(parts: Sequence[_Part], end: bytes) -> Iterator[bytes]:
    for part in parts:
        if part.before:
            yield part.before
        left = part.size_bytes
        with part.path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:
                    break
                yield chunk
        if left:
            raise invalid(f"{part.path}: the file changed while it was read")
        if part.after:
            yield part.after
    if end:
        yield end
