"""Reads the JSON documents of a repository, and bounds how many there are.

Small documents of versions, which plug-ins keep, are found by each process, and go with their version:
<root>/<name>/<model>@<version>@<key>.json   one document, replaced by a rename
<root>/<name>/….lock                         file locks of those who work on one; they end with their process

A damaged manifest or endpoint is an error that names the file. What can be found out again counts as not there then.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.model.names import check_name, check_version
from millstream.services.repository.disk import (
    FileLock,
    locked,
    read_file,
    replace_file,
    storage_errors,
    storage_failure,
    try_lock,
)

#: Of a document; a larger one is damaged. A manifest has some MiB at most.
DOCUMENT_BYTES_MAX = 64 << 20
VERSION_DOCUMENT_BYTES_MAX = 4 << 20  # a larger document counts as damaged
DOCUMENTS_MAX = 1024  # of one name; beyond, those that ended the longest ago are deleted
#: fields of a manifest that do not influence how the version runs, or that follow from its files
_NOT_CONTENT = {"created", "notes", "origin", "url", "index_ranges"}
Document = TypeVar("Document", bound=BaseModel)
Parsed = TypeVar("Parsed")

log = logging.getLogger("millstream.repository")


def content_of(document: BaseModel) -> bytes:
    """Return the bytes of a document's file.

    Fields with their defaults are left out: an earlier release, which may run beside this one, refuses those that it
    does not know.
    """
    return document.model_dump_json(indent=2, exclude_defaults=True).encode() + b"\n"


def read_document(path: Path, kind: type[Document], root: Path) -> Document | None:
    """Return the document at `path`; None if there is none. Raises Failure(INTERNAL) when it is damaged."""
    try:
        content = read_file(path, DOCUMENT_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise damaged(path, "it is no file") from None
    except ValueError as error:
        raise damaged(path, str(error)) from None
    except OSError as error:
        raise storage_failure(error, root) from error
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise damaged(path, ".".join(map(str, problem["loc"])) + f" {problem['msg']}".strip()) from error


def read_manifest(path: Path, model: str, version: int, root: Path) -> Manifest | None:
    """Return the manifest at `path`; None if there is none. Raises Failure(INTERNAL) if it is of another version."""
    manifest = read_document(path, Manifest, root)
    if manifest is not None and (manifest.model, manifest.version) != (model, version):
        raise damaged(path, f"it describes version {manifest.version} of {manifest.model!r}")
    return manifest


def read_endpoint(path: Path, model: str, root: Path) -> Endpoint | None:
    """Return the endpoint at `path`; None if there is none. Raises Failure(INTERNAL) if it is of another model."""
    endpoint = read_document(path, Endpoint, root)
    if endpoint is not None and endpoint.model != model:
        raise damaged(path, f"it describes {endpoint.model!r}")
    return endpoint


def damaged(path: Path, reason: str) -> Failure:
    """Return the failure for a damaged document."""
    return Failure(Code.INTERNAL, f"{path} is damaged: {reason}; restore it from a backup, or delete it")


def read_if_whole(path: Path, parse: Callable[[bytes], Parsed], bytes_max: int) -> Parsed | None:
    """Return what `parse` makes of a file; None if there is none or, with a line in the log, if it is damaged.

    A link counts as damaged. `parse` raises ValueError.
    """
    try:
        return parse(read_file(path, bytes_max, os.O_NOFOLLOW))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log_damaged(path, error)
        return None


def log_damaged(path: Path, error: Exception) -> None:
    """Say in the log that a document is damaged and counts as none."""
    why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    log.warning("%s is damaged and counts as none: %s", path, why)


def content_digest(manifest: Manifest) -> str:
    """Return a digest of what a version is and how it is served.

    It is equal for manifests that differ only in when they were published.
    """
    content = manifest.model_dump_json(exclude=_NOT_CONTENT)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def name_by_content(manifest: Manifest) -> str:
    """Return the name of a document about the content of a version."""
    return f"{check_version(manifest.version)}-{content_digest(manifest)}.json"


def make_room(folder: Path, kept: Path, files_max: int) -> None:
    """Delete the oldest documents of a model but `kept`: one that is often loaded with other content stays bounded."""
    others = [path for path in folder.glob("*.json") if path != kept]
    while len(others) >= files_max:
        oldest = min(others, key=lambda path: path.lstat().st_mtime)
        others.remove(oldest)
        with suppress(OSError):
            oldest.unlink(missing_ok=True)


class VersionDocument(BaseModel):
    """A document of a version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str
    version: int

    @property
    def key(self) -> str:
        """What tells the version's documents of one name apart."""
        raise NotImplementedError

    @property
    def over_at(self) -> float:
        """The instant after which it may be deleted to make room; 0: it may not."""
        return 0.0


D = TypeVar("D", bound=VersionDocument)


class _Stamped(NamedTuple, Generic[D]):
    """A document as it was read; None: it is damaged. `stamp`: inode, modification time and size of its file."""

    stamp: tuple[int, int, int]
    document: D | None


class VersionDocuments(Generic[D]):
    """The documents of one name. Safe for several threads and processes.

    Args:
        root: folder of the repository.
        name: of its folder there.
        of: type of the documents.
    """

    def __init__(self, root: Path, name: str, of: type[D]) -> None:
        self._root = root
        self._folder = root / name
        self._of = of
        self._seen: dict[str, _Stamped[D]] = {}  # file name -> what it held
        self._unreadable: set[str] = set()  # names of files of which the log says so

    def all(self) -> list[D]:
        """Return all that are not damaged; one that did not change since the last call is not read.

        A document that cannot be read at present counts as it was read last. Raises Failure(INTERNAL) if the folder
        cannot be listed: no document must seem to be deleted then.
        """
        with storage_errors(self._root):
            names = self._names()
        self._seen = {name: seen for name in names if (seen := self._look(name)) is not None}
        self._unreadable &= self._seen.keys()
        return [seen.document for seen in self._seen.values() if seen.document is not None]

    def of(self, model: str, version: int) -> list[D]:
        """Return the documents of a version. Raises Failure(INTERNAL)."""
        prefix = f"{check_name(model)}@{check_version(version)}@"
        with storage_errors(self._root):
            found = [self._read(self._folder / name) for name in self._names() if name.startswith(prefix)]
        return [document for document in found if document is not None]

    def get(self, model: str, version: int, key: str) -> D | None:
        """Return a document; None: there is none, or it is damaged. Raises Failure(INTERNAL)."""
        with storage_errors(self._root):
            return self._read(self._path(model, version, key))

    def change(self, model: str, version: int, key: str, change: Callable[[D | None], D | None]) -> D | None:
        """Replace a document by the result of `change`, which gets it as it is stored; None leaves it as it is.

        Returns what is stored then. Raises Failure(STORAGE, INTERNAL).
        """
        with storage_errors(self._root):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._folder / ".lock"):
                before = self.get(model, version, key)
                after = change(before)
                if after is None or after == before:
                    return before
                if before is None:
                    self._make_room()
                replace_file(self._path(model, version, key), after.model_dump_json(indent=1).encode() + b"\n")
                return after

    def try_lock(self, name: str) -> FileLock | None:
        """Lock a name; None: another process has it."""
        with storage_errors(self._root):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return try_lock(self._folder / f"{name}.lock")

    def _path(self, model: str, version: int, key: str) -> Path:
        return self._folder / f"{check_name(model)}@{check_version(version)}@{key}.json"

    def _names(self) -> list[str]:
        try:
            with os.scandir(self._folder) as entries:
                return sorted(entry.name for entry in entries if entry.name.endswith(".json"))
        except FileNotFoundError:
            return []

    def _look(self, name: str) -> _Stamped[D] | None:
        """Return a document as it is now, or was when it could be read last; None: it is gone, or was never read."""
        path, known = self._folder / name, self._seen.get(name)
        try:
            about = path.stat()
            stamp = (about.st_ino, about.st_mtime_ns, about.st_size)
            return known if known is not None and known.stamp == stamp else _Stamped(stamp, self._read(path))
        except FileNotFoundError:
            return None
        except OSError as error:  # as when the process has too many open files
            if name not in self._unreadable:
                self._unreadable.add(name)
                log.warning("%s cannot be read at present: %s", path, error.strerror)
            return known or _Stamped((0, 0, 0), None)

    def _read(self, path: Path) -> D | None:
        """Return a document; None: there is none, or it is damaged. Raises OSError if it cannot be read."""
        try:
            found = self._of.model_validate_json(read_file(path, VERSION_DOCUMENT_BYTES_MAX))
            if self._path(found.model, found.version, found.key) != path:
                raise ValueError("it is of another version")
            return found
        except FileNotFoundError:
            return None
        except (Failure, ValueError) as error:
            log_damaged(path, error)
            return None

    def _make_room(self) -> None:
        found = self.all()
        over = sorted((one for one in found if one.over_at), key=lambda one: one.over_at)
        for one in over[: max(0, len(found) + 1 - DOCUMENTS_MAX)]:
            path = self._path(one.model, one.version, one.key)
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)


def forget_documents(root: Path, model: str, version: int | None = None) -> None:
    """Delete the documents of a version that is deleted, or of all versions of a model, whatever plug-in keeps them."""
    number = "*" if version is None else str(check_version(version))
    for path in root.glob(f"*/{check_name(model)}@{number}@*"):
        with suppress(OSError):
            path.unlink(missing_ok=True)
