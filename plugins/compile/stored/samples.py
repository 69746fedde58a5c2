"""Samples: inputs with which a race calibrates and compares. They may be users' data: mode 0600, gone with the version.

<root>/models/<model>/<version>/race/uploaded.npz  given by a caller of the API; kept for later races of the version

services.model.samples says what they contain.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.disk import fsync, storage_errors
from millstream.services.repository.folder import FolderRepository

UNFINISHED_S = 3600.0  # after which the file of a write that did not end is deleted
_FOLDER, _NEW = "race", ".new-"

Array = np.ndarray[Any, Any]


def find_samples(repository: FolderRepository, manifest: Manifest) -> Path | None:
    """Return the samples of a version; None: there are none."""
    path = _folder(repository, manifest) / "uploaded.npz"
    return path if path.is_file() else None


def write_uploaded(repository: FolderRepository, manifest: Manifest, arrays: Mapping[str, Array]) -> None:
    """Store samples in place of earlier ones. Raises Failure(NOT_FOUND, STORAGE, INTERNAL)."""
    folder = _folder(repository, manifest)
    if not folder.parent.is_dir():
        raise Failure(Code.NOT_FOUND, f"version {manifest.version} of {manifest.model!r} was deleted")
    with storage_errors(folder.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=_NEW)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(folder / "uploaded.npz")
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        fsync(folder)


def sweep_samples(repository: FolderRepository) -> None:
    """Delete rows of live requests that an earlier release captured, and what killed processes left of writes."""
    now = time.time()  # noqa: TID251 - as the file system's clock
    for folder in repository.variants.beside(_FOLDER):
        with suppress(OSError):
            for path in folder.iterdir():
                unfinished = path.name.startswith(_NEW) and now - path.stat().st_mtime > UNFINISHED_S
                if unfinished or path.name == "captured.npz":
                    path.unlink(missing_ok=True)


def _folder(repository: FolderRepository, manifest: Manifest) -> Path:
    return repository.variants.compiled(manifest).parent / _FOLDER
