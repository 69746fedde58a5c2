"""Samples: inputs with which a race calibrates and compares. They may be users' data: mode 0600, gone with the version.

<root>/models/<model>/<version>/race/uploaded.npz  given by a caller of the API; kept for later races of the version
<root>/models/<model>/<version>/race/captured.npz  rows of live requests, if the endpoint allows it; gone after a race

services.model.samples says what they contain.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.disk import fsync, storage_errors

UNFINISHED_S = 3600.0  # after which the file of a write that did not end is deleted
_NEW = ".new-"

Array = np.ndarray[Any, Any]


class FoundSamples(NamedTuple):
    """Samples of a version.

    Args:
        captured: from live traffic; False: uploaded.
    """

    path: Path
    captured: bool


class Samples:
    """The samples of a repository's versions. Safe for several threads and processes.

    Args:
        models: the repository's folder of models.
    """

    def __init__(self, models: Path) -> None:
        self._models = models

    def find(self, manifest: Manifest) -> FoundSamples | None:
        """Return the uploaded samples, else the captured ones, if there are any."""
        for name in ("uploaded", "captured"):
            path = self._folder(manifest) / f"{name}.npz"
            if path.is_file():
                return FoundSamples(path, name == "captured")
        return None

    def write(self, manifest: Manifest, arrays: Mapping[str, Array], *, captured: bool = False) -> Path:
        """Store samples in place of earlier ones. Raises Failure(NOT_FOUND, STORAGE, INTERNAL)."""
        folder = self._folder(manifest)
        if not folder.parent.is_dir():
            raise Failure(Code.NOT_FOUND, f"version {manifest.version} of {manifest.model!r} was deleted")
        path = folder / ("captured.npz" if captured else "uploaded.npz")
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

    def forget_captured(self, manifest: Manifest, *, older_s: float = 0.0) -> None:
        """Delete samples of live traffic, if they are old enough: a race has used them, or none came."""
        path = self._folder(manifest) / "captured.npz"
        with suppress(OSError):
            if not older_s or time.time() - path.stat().st_mtime > older_s:  # noqa: TID251 - as the file system's clock
                path.unlink(missing_ok=True)

    def sweep(self, asked: Callable[[str], bool], older_s: float) -> None:
        """Delete old and unwanted samples of live traffic, of all versions, and what killed processes left of files.

        Args:
            asked: whether a model's endpoint asks for samples; those of others are deleted.
            older_s: others are deleted at this age.
        """
        now = time.time()  # noqa: TID251 - as the file system's clock
        for path in self._models.glob("*/*/race/*"):
            captured = path.name == "captured.npz"
            if not captured and not path.name.startswith(_NEW):
                continue
            with suppress(OSError):
                age_s = now - path.stat().st_mtime
                if age_s > (older_s if captured else UNFINISHED_S) or (captured and not asked(path.parts[-4])):
                    path.unlink(missing_ok=True)

    def _folder(self, manifest: Manifest) -> Path:
        return self._models / manifest.model / str(manifest.version) / "race"
