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

UNFINISHED_S = 3600.0  # after which the file of a write that did not end is deleted
_NEW = ".new-"

Array = np.ndarray[Any, Any]


class Samples:
    """The samples of a repository's versions. Safe for several threads and processes.

    Args:
        models: the repository's folder of models.
    """

    def __init__(self, models: Path) -> None:
        self._models = models

    def find(self, manifest: Manifest) -> Path | None:
        """Return the uploaded samples; None: there are none."""
        path = self._folder(manifest) / "uploaded.npz"
        return path if path.is_file() else None

    def write(self, manifest: Manifest, arrays: Mapping[str, Array]) -> Path:
        """Store samples in place of earlier ones. Raises Failure(NOT_FOUND, STORAGE, INTERNAL)."""
        folder = self._folder(manifest)
        if not folder.parent.is_dir():
            raise Failure(Code.NOT_FOUND, f"version {manifest.version} of {manifest.model!r} was deleted")
        path = folder / "uploaded.npz"
        with storage_errors(self._models):
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=_NEW)  # mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    np.savez(file, **arrays)  # type: ignore[arg-type]
                    file.flush()
                    os.fsync(file.fileno())
                Path(temporary).replace(path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            fsync(folder)
        return path

    def sweep(self) -> None:
        """Delete rows of live requests that an earlier release captured, and what killed processes left of writes."""
        now = time.time()  # noqa: TID251 - as the file system's clock
        for path in self._models.glob("*/*/race/*"):
            if path.name == "captured.npz" or path.name.startswith(_NEW):
                with suppress(OSError):
                    if path.name == "captured.npz" or now - path.stat().st_mtime > UNFINISHED_S:
                        path.unlink(missing_ok=True)

    def _folder(self, manifest: Manifest) -> Path:
        return self._models / manifest.model / str(manifest.version) / "race"
