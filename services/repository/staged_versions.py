"""Staged versions: a load replaces the served versions of a model in a two-phase commit.

stage ─> workers load them beside the served ones ─> all ready: commit (one change: manifests, endpoint, removals)
                                                  └> else:      abort (nothing has changed)

<root>/models/<model>/<version>/staged.json      a Manifest
<root>/models/<model>/<version>/original.json    the Manifest that was published, while a load has replaced it
<root>/models/<model>/added_files/<random>/…     files that came with a load
<root>/.loading/<model>.lock                     locked by the process that loads the model
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from millstream.services.errors import Code, Failure, Subject
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.model.names import check_name, check_version, is_version
from millstream.services.repository.disk import FileLock, fsync, fsync_tree, replace_file, storage_errors, try_lock
from millstream.services.repository.documents import content_of, read_endpoint, read_manifest
from millstream.services.repository.staging import Staging

_STAGED, _ORIGINAL, _PUBLISHED = "staged.json", "original.json", "manifest.json"
_ADDED_FILES = "added_files"


class StagedVersions:
    """The versions between the two phases of a commit: workers load them beside the served versions of the model.

    Args:
        root: folder of the repository.
        changing: opens the repository's context for one change of a model at a time.
    """

    def __init__(self, root: Path, changing: Callable[[str], AbstractContextManager[None]]) -> None:
        self._root = root
        self._models = root / "models"
        self._locks = root / ".loading"
        self._changing = changing

    def lock(self, model: str) -> FileLock | None:
        """Lock `model` for one load, against all processes; None while another process has the lock.

        Versions that a dead process left staged are aborted.
        """
        with storage_errors(self._root):
            self._locks.mkdir(exist_ok=True)
            lock = try_lock(self._locks / f"{check_name(model)}.lock")
        if lock is None:
            return None
        try:
            if self.of(model):
                self.abort(model)
        except BaseException:
            lock.release()
            raise
        return lock

    def models(self) -> list[str]:
        """Return the names of the models that have staged versions, sorted."""
        with storage_errors(self._root):
            return sorted({path.parent.parent.name for path in self._models.glob(f"*/*/{_STAGED}")})

    def of(self, model: str) -> list[Manifest]:
        """Return the staged versions of a model, ascending."""
        manifests = (self._read(model, version, _STAGED) for version in self._folders(model))
        return [manifest for manifest in manifests if manifest is not None]

    def original(self, model: str, version: int) -> Manifest | None:
        """Return the manifest that the version was published with, also if a load has replaced it since."""
        return self._read(model, version, _ORIGINAL) or self._read(model, version, _PUBLISHED)

    def add_files(self, model: str, staging: Staging) -> Path:
        """Move the files in `staging` to a folder of the model and return it.

        The next commit or abort removes the folder unless a manifest names it as its origin.
        """
        target = self._models / check_name(model) / _ADDED_FILES / secrets.token_hex(8)
        with storage_errors(self._root):
            fsync_tree(staging.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            staging.path.rename(target)
            fsync(target.parent)
        return target

    def stage(self, manifests: Sequence[Manifest]) -> None:
        """Stage `manifests`, all of one model: workers load them beside the versions that they serve.

        Raises Failure(NOT_FOUND) if one is of an upload that was deleted.
        """
        with storage_errors(self._root), self._changing(manifests[0].model):
            for manifest in manifests:
                uploaded = self.original(manifest.model, manifest.version) if manifest.origin is None else manifest
                if uploaded is None or uploaded.digest != manifest.digest:
                    raise _deleted(manifest)
            for manifest in manifests:
                folder = self._folder(manifest.model, manifest.version)
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(folder / _STAGED, content_of(manifest))

    def abort(self, model: str) -> None:
        """Remove all staged versions of a model, and added files that no manifest names."""
        with storage_errors(self._root), self._changing(check_name(model)):
            self._clear(model)

    def commit(self, endpoint: Endpoint, manifests: Sequence[Manifest], removed: Sequence[int] = ()) -> Endpoint:
        """Replace the model's versions by `manifests` and its endpoint by `endpoint`, in one change.

        Args:
            endpoint: compared with the stored generation, and written one generation higher.
            manifests: the versions that are served from now on.
            removed: versions to delete.

        Raises:
            Failure: CONFLICT when the endpoint was changed in between: read it again and decide again. NOT_FOUND when
                one of the versions is neither staged nor published: it was deleted in between.
        """
        model = check_name(endpoint.model)
        path = self._models / model / "endpoint.json"
        with storage_errors(self._root), self._changing(model):
            stored = read_endpoint(path, model, self._root)
            if (stored.generation if stored else 0) != endpoint.generation:
                raise Failure(Code.CONFLICT, f"endpoint {model!r} was changed in between: read it again")
            self.check_kept(manifests)
            path.parent.mkdir(exist_ok=True)
            for manifest in manifests:
                self._put(manifest)
            written = endpoint.model_copy(update={"generation": endpoint.generation + 1})
            replace_file(path, content_of(written))
            for version in removed:
                shutil.rmtree(self._folder(model, version), ignore_errors=True)
            self._clear(model)
            return written

    def check_kept(self, manifests: Sequence[Manifest]) -> None:
        """Raise Failure(NOT_FOUND) if one of `manifests` is neither staged nor published any more."""
        for manifest in manifests:
            names = (_STAGED, _PUBLISHED)
            if all(self._read(manifest.model, manifest.version, name) != manifest for name in names):
                raise _deleted(manifest)

    def _put(self, manifest: Manifest) -> None:
        folder = self._folder(manifest.model, manifest.version)
        folder.mkdir(parents=True, exist_ok=True)
        published = self._read(manifest.model, manifest.version, _PUBLISHED)
        original = folder / _ORIGINAL
        if published is not None and published.origin is None and not original.exists() and published != manifest:
            replace_file(original, content_of(published))
        replace_file(folder / _PUBLISHED, content_of(manifest))
        if self._read(manifest.model, manifest.version, _ORIGINAL) == manifest:
            original.unlink()

    def _clear(self, model: str) -> None:
        """Remove staged manifests, empty folders, and added files that no manifest names."""
        origins = set()
        for version in self._folders(model):
            folder = self._folder(model, version)
            (folder / _STAGED).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
            for name in (_PUBLISHED, _ORIGINAL):
                manifest = self._read(model, version, name)
                if manifest is not None:
                    origins.add(manifest.origin)
        added = self._models / model / _ADDED_FILES
        for folder in added.iterdir() if added.is_dir() else ():
            if str(folder) not in origins:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in (added, self._models / model):
            with suppress(OSError):  # not empty
                folder.rmdir()

    def _read(self, model: str, version: int, name: str) -> Manifest | None:
        return read_manifest(self._folder(model, version) / name, model, version, self._root)

    def _folder(self, model: str, version: int) -> Path:
        return self._models / check_name(model) / str(check_version(version))

    def _folders(self, model: str) -> list[int]:
        return sorted(self._numbers(self._models / check_name(model)))

    def _numbers(self, folder: Path) -> Iterator[int]:
        with storage_errors(self._root), suppress(FileNotFoundError, NotADirectoryError):
            for entry in folder.iterdir():
                if is_version(entry.name) and entry.is_dir():
                    yield int(entry.name)


def _deleted(manifest: Manifest) -> Failure:
    return Failure(Code.NOT_FOUND, f"version {manifest.version} was deleted meanwhile", subject=Subject.VERSION)
