"""A repository in a local folder. Every change is one rename; readers take no lock and see no partial change.

<root>/models/<model>/<version>/…        renamed in from .staging/ (publish), out to it (delete)
<root>/models/<model>/endpoint.json      replaced under <root>/.lock
<root>/models/<model>/numbers.json       the highest version number ever published
<root>/models/<model>/verdicts/…         what running a version has shown
<root>/footprints/<model>/…              the memory that instances of a version took
<root>/<name>/<model>@<version>@…        documents that plug-ins keep of a version (documents)
<root>/.token                            new content of the same length before and after each change
<root>/.changes                          which model each change was of (change_log)
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from millstream.services.errors import Code, Failure, Subject, not_found
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.model.names import check_name, check_version, is_version
from millstream.services.repository.change_log import NO_ID, ChangeLog
from millstream.services.repository.disk import (
    fsync,
    fsync_tree,
    locked,
    overwrite,
    read_file,
    replace_file,
    replacing,
    storage_errors,
    storage_failure,
    tree_bytes,
    try_lock,
)
from millstream.services.repository.documents import (
    D,
    VersionDocuments,
    content_of,
    forget_documents,
    read_document,
    read_endpoint,
    read_manifest,
)
from millstream.services.repository.footprints import Footprints
from millstream.services.repository.staged_versions import StagedVersions
from millstream.services.repository.staging import Staging, open_staging, reserve_staging, sweep_staging
from millstream.services.repository.variants import Variants
from millstream.services.repository.verdicts import Verdicts

T = TypeVar("T")

_TOKEN_BYTES_MAX = 1 << 20  # a change overwrites the start of a damaged one alone
_CHANGING = "changing"
_SETTLED = "settled "
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
#: listings of a model that seems to be empty, while other processes change the repository
_LISTINGS_MAX = 5
#: A younger file may change again without a new modification time.
_SETTLED_NS = 2_000_000_000


class _Numbers(BaseModel):
    """Numbers that outlive deleted versions: `highest` is the highest number ever published."""

    highest: int = 0


class FolderRepository:
    """The repository in the folder `root`, which is created if missing. Safe for many processes and threads.

    Its calls block, and raise Failure: NOT_FOUND, CONFLICT, STORAGE (no space), INTERNAL (the folder cannot be used).
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._models = self._root / "models"
        self._staging = self._root / ".staging"
        self._lock = self._root / ".lock"
        self._token = self._root / ".token"
        self._change_log = ChangeLog(self._root / ".changes")
        with storage_errors(self._root):
            self._make()
        sweep_staging(self._staging)
        self._settle_token()
        self.staged = StagedVersions(self._root, self._changing)
        self.verdicts = Verdicts(self._root, self._changing)
        self.variants = Variants(self._models)
        self.footprints = Footprints(self._root)

    def documents(self, name: str, of: type[D]) -> VersionDocuments[D]:
        """Return the store of a plug-in's documents of versions, which go with their versions."""
        return VersionDocuments(self._root, name, of)

    def open_staging(self) -> Staging:
        """Open a staging folder on the disk of the versions. Raises Failure(STORAGE, INTERNAL)."""
        return open_staging(self._staging)

    def publish(
        self,
        staging: Staging,
        manifest: Manifest,
        *,
        activate: bool = False,
        owner: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Rename the staged files to the version that `manifest` names. A full disk leaves no part of the version.

        Args:
            staging: the folder to publish; it is empty afterwards.
            manifest: describes the version.
            activate: make it the active version, too.
            owner: of the model, if this is its first version.
            check: called while no other version can be published; what it raises, this raises.

        Raises Failure(CONFLICT) if the version exists: versions are immutable.
        """
        target = self._version_folder(manifest.model, manifest.version)
        if (target / "manifest.json").exists():
            raise _exists(manifest)
        with storage_errors(self._root):
            (staging.path / "manifest.json").write_bytes(content_of(manifest))
            fsync_tree(staging.path)
            with self._changing(manifest.model), _kept_if_used(target.parent), ExitStack() as documents:
                check()
                fsync(self._models)
                # All writes that need space come before the rename, so that a full disk leaves no part of a version.
                documents.enter_context(self._remembering(manifest.model, manifest.version))
                documents.enter_context(self._naming(manifest.model, manifest.version, activate=activate, owner=owner))
                try:
                    staging.path.rename(target)
                except OSError as error:
                    if error.errno in _TAKEN:
                        raise _exists(manifest) from None
                    raise
                self.verdicts.forget(manifest.model, manifest.version)  # of a load that was aborted
                fsync(target.parent)

    def models(self) -> Sequence[str]:
        """Return the names of the models that have an endpoint or a version, sorted."""
        return sorted(name for name in self._names() if self._listed(name))

    def versions(self, model: str) -> Sequence[int]:
        """Return the published versions, ascending; empty for an unknown model."""
        name = check_name(model)
        return self._list_again_if_changed(lambda: self._versions(name)) or []

    def manifest(self, model: str, version: int) -> Manifest:
        """Return the version's manifest. Raises Failure: NOT_FOUND, INTERNAL when the document is damaged."""
        path = self._version_folder(model, version) / "manifest.json"
        manifest = read_manifest(path, model, version, self._root)
        if manifest is None:
            raise self._missing(model, version)
        return manifest

    def local_path(self, model: str, version: int) -> Path:
        """Return the folder with the version's files. Raises Failure(NOT_FOUND)."""
        return self.folder_of(self.manifest(model, version))

    def folder_of(self, manifest: Manifest) -> Path:
        """Return the folder that the paths of `manifest` are relative to, for example in a Triton repository."""
        if manifest.origin is not None:
            return Path(manifest.origin)
        return self._version_folder(manifest.model, manifest.version)

    def endpoint(self, model: str) -> Endpoint:
        """Return the endpoint. Raises Failure: NOT_FOUND, INTERNAL when the document is damaged."""
        path = self._models / check_name(model) / "endpoint.json"

        def read() -> Endpoint | None:
            written = read_endpoint(path, model, self._root)
            return written or (Endpoint(model=model) if self._versions(model) else None)

        endpoint = self._list_again_if_changed(read)
        if endpoint is None:
            raise not_found(f"there is no model {model!r}")
        return endpoint

    def replace_endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Write `endpoint` if its generation equals the stored one; return it one generation higher.

        Raises Failure: CONFLICT if another process changed it in between, NOT_FOUND.
        """
        path = self._models / check_name(endpoint.model) / "endpoint.json"
        with storage_errors(self._root), self._changing(endpoint.model):
            stored = self.endpoint(endpoint.model)
            if stored.generation != endpoint.generation:
                raise Failure(
                    Code.CONFLICT,
                    f"endpoint {endpoint.model!r} was changed in between (generation {stored.generation}, "
                    f"not {endpoint.generation}): read it again",
                )
            written = _next_generation(endpoint)
            replace_file(path, content_of(written))
            return written

    def delete_version(self, model: str, version: int) -> None:
        """Rename the version away, then remove it. Raises Failure(NOT_FOUND)."""
        folder = self._version_folder(model, version)
        with storage_errors(self._root), reserve_staging(self._staging) as trash, self._changing(model):
            if not folder.is_dir():
                raise self._missing(model, version)
            with self._remembering(model, version):
                folder.rename(trash.path)
            self.verdicts.forget(model, version)
            self.footprints.forget(model, version)
            forget_documents(self._root, model, version)
            fsync(folder.parent)

    def delete_model(self, model: str, *, if_empty: bool = False) -> None:
        """Rename the model's folder away, then remove it; with `if_empty`, unless it has a version.

        Raises Failure(NOT_FOUND).
        """
        folder = self._models / check_name(model)
        with storage_errors(self._root), reserve_staging(self._staging) as trash, self._changing(model):
            if not self._is_stored(model):
                raise not_found(f"there is no model {model!r}")
            if if_empty and self._versions(model):
                return
            folder.rename(trash.path)
            self.footprints.forget_model(model)
            forget_documents(self._root, model)
            fsync(self._models)

    def next_version(self, model: str) -> int:
        """Return one more than the highest version ever published: deleted numbers are not assigned again.

        Raises Failure(INVALID) when no number is left.
        """
        return check_version(max(self._highest(check_name(model)), *self._versions(model), 0) + 1)

    def size_bytes(self, model: str) -> int:
        """Return the bytes of all files below the model's folder."""
        with storage_errors(self._root):
            return tree_bytes(self._models / check_name(model))

    def stamp(self, model: str) -> Hashable:
        """Return the identities and times of the model's documents: a few stat calls, no file is read."""
        folder = self._models / check_name(model)
        identities: list[tuple[str, int, int, int]] = []
        newest = 0
        try:
            for entry in _entries(folder):
                about = entry.stat(follow_symlinks=False)
                identities.append((entry.path, about.st_ino, about.st_mtime_ns, about.st_size))
                newest = max(newest, about.st_mtime_ns)
        except OSError:  # the model is changing, or unreadable: read it again next time
            return time.monotonic_ns()
        # The clock of a file system ticks every few milliseconds: two changes within one tick have the same time.
        if newest > time.time_ns() - _SETTLED_NS:
            identities.append(("changed just now", time.monotonic_ns(), 0, 0))
        return tuple(sorted(identities))

    def token(self) -> str:
        """Return another string after every change; during a change, or after an interrupted one, at each call."""
        try:
            token = read_file(self._token, _TOKEN_BYTES_MAX).decode("ascii")
        except FileNotFoundError:
            return ""
        except ValueError:
            token = _CHANGING  # it is damaged: readers read at each call, until the next change or start writes it anew
        except OSError as error:
            raise storage_failure(error, self._root) from error
        return f"{token} {time.monotonic_ns()}" if token.startswith(_CHANGING) else token

    def changed_since(self, seen: str, now: str) -> set[str] | None:
        """Return the models that changed between two tokens, and perhaps later ones; None if that is not known."""
        if not (seen and now):
            return None
        return self._change_log.between(_id(seen), _id(now), seen_unfinished=seen.startswith(_CHANGING))

    @contextmanager
    def _changing(self, model: str) -> Iterator[None]:
        """Allow one change at a time. A process that dies leaves the token at "changing": readers notice the change."""
        with locked(self._lock):
            change = secrets.token_hex(8)
            self._change_log.add(self._current_id(), change, model)
            self._write_token(_CHANGING, change)
            try:
                yield
            finally:
                with suppress(OSError):  # the change is made; while the token is "changing", readers read again
                    self._write_token(_SETTLED, change)

    def _current_id(self) -> str:
        try:
            return _id(read_file(self._token, _TOKEN_BYTES_MAX).decode("ascii"))
        except (OSError, ValueError):
            return NO_ID

    def _write_token(self, phase: str, change: str) -> None:
        overwrite(self._token, f"{phase} {change}".encode())

    def _settle_token(self) -> None:
        """Write a settled token if a dead process left "changing". In a read-only folder readers read at each call."""
        with suppress(OSError):
            with suppress(ValueError):  # a damaged one is written anew
                if not read_file(self._token, _TOKEN_BYTES_MAX).decode("ascii").startswith(_CHANGING):
                    return
            lock = try_lock(self._lock)
            if lock is None:
                return
            try:
                self._write_token(_SETTLED, secrets.token_hex(8))
            finally:
                lock.release()

    def _make(self) -> None:
        try:
            self._models.mkdir(parents=True, exist_ok=True)
        except OSError:  # a read-only disk suffices for readers
            if not self._models.is_dir():
                raise

    def _version_folder(self, model: str, version: int) -> Path:
        return self._models / check_name(model) / str(check_version(version))

    def _names(self) -> list[str]:
        with storage_errors(self._root):
            return [entry.name for entry in self._models.iterdir() if _allowed(entry.name)]

    def _listed(self, model: str) -> bool:
        try:
            return self._is_stored(model)
        except (Failure, OSError):  # unreadable: list it, so that reading it reports the error and other models work
            return True

    def _is_stored(self, model: str) -> bool:
        path = self._models / model / "endpoint.json"
        return bool(self._list_again_if_changed(lambda: path.exists() or self._versions(model)))

    def _list_again_if_changed(self, list_: Callable[[], T]) -> T:
        """Return the result of `list_`; while it is empty and the repository changes meanwhile, list again.

        A listing of a folder may miss a version that was published after it began, and one that was deleted before it
        ended. The listing of a model that always had a version can therefore be empty.
        """
        listed = list_()
        for _ in range(_LISTINGS_MAX):
            if listed:
                break
            token = self.token()
            listed = list_()
            if self.token() == token:
                break
        return listed

    def _versions(self, model: str) -> list[int]:
        try:
            return sorted(
                int(entry.name)
                for entry in (self._models / model).iterdir()
                if is_version(entry.name) and (entry / "manifest.json").exists()
            )
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_failure(error, self._root) from error

    @contextmanager
    def _remembering(self, model: str, version: int) -> Iterator[None]:
        """Store the version's number when the block ends, so that it is not assigned again after a deletion."""
        if version <= self._highest(model):
            yield
            return
        numbers = _Numbers(highest=version)
        with replacing(self._models / model / "numbers.json", numbers.model_dump_json().encode() + b"\n"):
            yield

    @contextmanager
    def _naming(self, model: str, version: int, *, activate: bool, owner: str) -> Iterator[None]:
        """Write the endpoint when the block ends, which publishes a version. Arguments as of `publish`."""
        path = self._models / model / "endpoint.json"
        before = read_endpoint(path, model, self._root)
        endpoint = before or Endpoint(model=model)
        if owner and before is None and not self._versions(model):
            endpoint = endpoint.with_owner(owner)
        if activate:
            endpoint = endpoint.with_active(version)
        if endpoint == (before or Endpoint(model=model)):
            yield
            return
        with replacing(path, content_of(_next_generation(endpoint))):
            yield

    def _highest(self, model: str) -> int:
        numbers = read_document(self._models / model / "numbers.json", _Numbers, self._root)
        return numbers.highest if numbers else 0

    def _missing(self, model: str, version: int) -> Failure:
        if self._is_stored(model):
            return not_found(f"model {model!r} has no version {version}")
        return not_found(f"there is no model {model!r}")


@contextmanager
def _kept_if_used(folder: Path) -> Iterator[None]:
    """Create `folder`; remove it if the block raises and it is empty."""
    folder.mkdir(exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise


def _id(token: str) -> str:
    """Return the id in a token: "settled  ID", or "changing ID" and a number that differs at each call."""
    words = token.split()
    return words[1] if len(words) > 1 else NO_ID


def _next_generation(endpoint: Endpoint) -> Endpoint:
    return endpoint.model_copy(update={"generation": endpoint.generation + 1})


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a model's folder and of its direct subfolders: documents and verdicts, no source files."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                with os.scandir(entry.path) as inner:
                    yield from inner


def _allowed(name: str) -> bool:
    try:
        return check_name(name) == name
    except Failure:
        return False


def _exists(manifest: Manifest) -> Failure:
    return Failure(
        Code.CONFLICT,
        f"version {manifest.version} of model {manifest.model!r} already exists and versions are immutable: "
        "use another number, or delete it first",
        subject=Subject.VERSION,
    )
