"""Versions on trial: what a load wants to serve in place of what serves now, until workers have shown that they can.

propose ─> workers load it beside the old one ─> ready: adopt (one change: manifests, endpoint, what is dropped)
                                              ─> not:   withdraw (nothing has changed)

<root>/models/<model>/<version>/proposed.json   a Manifest
<root>/models/<model>/<version>/uploaded.json   the Manifest that was published, while a load has put another in its place
<root>/models/<model>/given/<random>/…          files that came with a load
<root>/.loading/<model>.lock                    held by the process that loads the model
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Endpoint, Manifest
from millstream.services.model.names import check_name, check_version
from millstream.services.repository.base import Staging
from millstream.services.repository.disk import fsync, fsync_tree, replace_file, storage_errors, try_lock
from millstream.services.repository.documents import content_of, read_endpoint, read_manifest

_PROPOSED, _UPLOADED, _PUBLISHED = "proposed.json", "uploaded.json", "manifest.json"
_NUMBER = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)


class FolderProposals:
    """The proposals of a folder repository. `changing`: its way of making one change at a time."""

    def __init__(self, root: Path, changing: Callable[[], AbstractContextManager[None]]) -> None:
        self._root = root
        self._models = root / "models"
        self._locks = root / ".loading"
        self._changing = changing

    def claim(self, model: str) -> FolderClaim | None:
        """The right to load `model`, against all processes; None while somebody else has it. What the last owner left
        behind is withdrawn.
        """
        with storage_errors(self._root):
            self._locks.mkdir(exist_ok=True)
            descriptor = try_lock(self._locks / f"{check_name(model)}.lock")
        if descriptor is None:
            return None
        claim = FolderClaim(descriptor)
        try:
            if self.of(model):
                self.withdraw(model)
        except BaseException:
            claim.release()
            raise
        return claim

    def models(self) -> list[str]:
        """Names of the models that have proposals."""
        with storage_errors(self._root):
            return sorted({path.parent.parent.name for path in self._models.glob(f"*/*/{_PROPOSED}")})

    def of(self, model: str) -> list[Manifest]:
        """The proposed versions of a model, ascending."""
        found = (self._read(model, version, _PROPOSED) for version in self._folders(model))
        return [manifest for manifest in found if manifest is not None]

    def uploaded(self, model: str, version: int) -> Manifest | None:
        """The manifest that the version was published with, whatever a load has made of it since."""
        return self._read(model, version, _UPLOADED) or self._read(model, version, _PUBLISHED)

    def give(self, model: str, staging: Staging) -> Path:
        """Keep the staged files below the model; returns the folder. It stays while a manifest names it as its origin."""
        target = self._models / check_name(model) / "given" / secrets.token_hex(8)
        with storage_errors(self._root):
            fsync_tree(staging.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            staging.path.rename(target)
            fsync(target.parent)
        return target

    def propose(self, manifests: Sequence[Manifest]) -> None:
        """Have workers load these beside what they serve."""
        with storage_errors(self._root), self._changing():
            for manifest in manifests:
                folder = self._folder(manifest.model, manifest.version)
                folder.mkdir(parents=True, exist_ok=True)
                replace_file(folder / _PROPOSED, content_of(manifest))

    def withdraw(self, model: str) -> None:
        """Take all proposals of a model back, and the files that came with them."""
        with storage_errors(self._root), self._changing():
            self._clear(check_name(model))

    def adopt(self, endpoint: Endpoint, manifests: Sequence[Manifest], dropped: Sequence[int] = ()) -> Endpoint:
        """Make `manifests` the model's versions, and `endpoint` its endpoint, in one change; `dropped` versions go.

        Raises Failure(CONFLICT) when the endpoint was changed in between: read it again and decide again.
        """
        model = check_name(endpoint.model)
        path = self._models / model / "endpoint.json"
        with storage_errors(self._root), self._changing():
            stored = read_endpoint(path, model, self._root)
            if (stored.generation if stored else 0) != endpoint.generation:
                raise Failure(Code.CONFLICT, f"endpoint {model!r} was changed in between: read it again")
            path.parent.mkdir(exist_ok=True)
            for manifest in manifests:
                self._put(manifest)
            written = endpoint.model_copy(update={"generation": endpoint.generation + 1})
            replace_file(path, content_of(written))
            for version in dropped:
                shutil.rmtree(self._folder(model, version), ignore_errors=True)
            self._clear(model)
            return written

    def _put(self, manifest: Manifest) -> None:
        folder = self._folder(manifest.model, manifest.version)
        folder.mkdir(parents=True, exist_ok=True)
        published = self._read(manifest.model, manifest.version, _PUBLISHED)
        kept = folder / _UPLOADED
        if published is not None and published.origin is None and not kept.exists() and published != manifest:
            replace_file(kept, content_of(published))
        replace_file(folder / _PUBLISHED, content_of(manifest))
        if self._read(manifest.model, manifest.version, _UPLOADED) == manifest:
            kept.unlink()

    def _clear(self, model: str) -> None:
        """Remove proposals, folders that nothing is left in, and given files that no manifest names."""
        used = set()
        for version in self._folders(model):
            folder = self._folder(model, version)
            (folder / _PROPOSED).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
            for name in (_PUBLISHED, _UPLOADED):
                manifest = self._read(model, version, name)
                if manifest is not None:
                    used.add(manifest.origin)
        given = self._models / model / "given"
        for folder in given.iterdir() if given.is_dir() else ():
            if str(folder) not in used:
                shutil.rmtree(folder, ignore_errors=True)
        for left in (given, self._models / model):
            with suppress(OSError):
                left.rmdir()

    def _read(self, model: str, version: int, name: str) -> Manifest | None:
        return read_manifest(self._folder(model, version) / name, model, version, self._root)

    def _folder(self, model: str, version: int) -> Path:
        return self._models / check_name(model) / str(check_version(version))

    def _folders(self, model: str) -> list[int]:
        return sorted(self._numbers(self._models / check_name(model)))

    def _numbers(self, folder: Path) -> Iterator[int]:
        with storage_errors(self._root), suppress(FileNotFoundError, NotADirectoryError):
            for entry in folder.iterdir():
                if _NUMBER.fullmatch(entry.name) and entry.is_dir():
                    yield int(entry.name)


class FolderClaim:
    """The right to load a model; the kernel takes it back when its process dies."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
