"""Uploads of model files and folders: read twice, for the digest and to be sent, and never in memory as a whole.

file or folder ─> the model in it, and what belongs to it ─> its bytes, or a tar ─> POST or PUT ─> its document
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from millstream.client.call import Body, Call, Steps, json_of, send
from millstream.client.documents import Version
from millstream.client.errors import Timeout, VersionFailed, WrongFile
from millstream.client.models import admin_path, version, wait
from millstream.client.replies import document_of
from millstream.client.retry import Budget
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.file_kind import PICKLE_REFUSAL, content_head, is_pickle
from millstream.services.ingest.importers import SOURCE
from millstream.services.ingest.layout import NoModel, recognise
from millstream.services.ingest.packing import Part, parts_of, pieces, total_bytes

CHECK_S_MAX = 900.0
REPLY_WAIT_S_MAX = 30.0  # proxies give up on a silent reply, often after 60 s; a longer wait asks again
_SETTLED = {"ready", "standby", "failed", "unloaded"}

#: called with the bytes sent so far and the bytes of the whole upload
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What an upload sends of a file or folder. Create it with `open`, which reads all of that once.

    Attributes:
        pickled: whether it is a pickle, which is sent only if the caller allows it.
        notes: on what is not sent, for the owner.
    """

    path: Path
    size_bytes: int
    sha256: str
    _parts: Sequence[Part]
    pickled: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any] | None = None) -> ModelFiles:
        """Recognise the model in a file or folder, and read what belongs to it. `config`: of the version.

        Raises Failure(INVALID) if it is missing, empty, cannot be read, or is no model: nothing is sent then.
        """
        try:
            if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
                raise ValueError("this is neither a file nor a folder")
            found = recognise(path)
            parts = parts_of(found, _named_files(config or {}))
            digest = hashlib.sha256()
            for piece in pieces(parts):
                digest.update(piece)
        except FileNotFoundError as error:
            raise invalid(f"{error.filename or path}: there is no such file") from error
        except (OSError, ValueError) as error:
            raise invalid(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        except Failure as failure:
            what = "there is no model in this folder: " if isinstance(failure, NoModel) and path.is_dir() else ""
            raise WrongFile(f"{path}: {what}{failure.message}") from failure
        pickled = found.importer is not None and found.path.is_file() and is_pickle(content_head(found.path))
        return cls(path, total_bytes(parts), digest.hexdigest(), parts, pickled, found.notes)

    def body(self, progress: Progress | None = None) -> Body:
        """Return the body of a request; `progress` is called after each piece that was sent."""

        def chunks() -> Iterator[bytes]:
            sent = 0
            try:
                for piece in pieces(self._parts):
                    yield piece
                    sent += len(piece)
                    if progress is not None:
                        progress(sent, self.size_bytes)
            except OSError as error:
                raise invalid(f"{error.filename or self.path}: {error.strerror or error}") from error

        return Body(self.size_bytes, chunks)


def _named_files(config: Mapping[str, Any]) -> list[str]:
    """Return the files that a version's configuration names, below the folder that is sent; the server checks them."""
    labels = config.get("labels")
    named = list(labels.values()) if isinstance(labels, dict) else []
    for warmup in config.get("warmup") or ():
        inputs = warmup.get("inputs") if isinstance(warmup, dict) else None
        named += [one.get("file") for one in (inputs or {}).values() if isinstance(one, dict)]
    below = f"{SOURCE}/"
    found = [name.removeprefix(below) for name in named if isinstance(name, str) and name.startswith(below)]
    return [name for name in found if name and not name.startswith("/")]


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
        query["config"] = json_of(options.config, "the configuration is").decode()
    call = Call(
        "POST" if options.version is None else "PUT",
        f"{admin_path(name)}/versions" + ("" if options.version is None else f"/{options.version}"),
        query=query,
        headers={"Content-Type": "application/octet-stream", "X-Content-SHA256": files.sha256},
        content=files.body(progress),
        read_s=CHECK_S_MAX + asked_s,
    )
    document = cast("Version", document_of((yield from send(call)), "version", "state", "reason", "notes"))
    if options.wait_s > asked_s and document["state"] not in _SETTLED:
        budget = Budget(options.wait_s - asked_s, clock)
        try:
            document = yield from wait(name, document["version"], budget)
        except Timeout:
            document = yield from version(name, document["version"])
    document["notes"] = [*files.notes, *document["notes"]]
    if document["state"] == "failed":
        raise VersionFailed(name, document["version"], document["reason"] or "no reason is known")
    return document
