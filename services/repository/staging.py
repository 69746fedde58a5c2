"""Private folders on the repository's disk, so that one rename publishes their content.

.staging/<random>.lock    locked until the process that owns the folder ends
.staging/<random>/        files of an upload or a load
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Self

from millstream.services.repository.disk import storage_errors, try_lock
from millstream.services.repository.removal import remove_tree

_LOCK = ".lock"


class FolderStaging:
    """A staging folder of this process. Leaving the `with` block removes it with all files that are still in it."""

    def __init__(self, folder: Path, lock: Path, descriptor: int) -> None:
        self._folder = folder
        self._lock = lock
        self._descriptor: int | None = descriptor

    @property
    def path(self) -> Path:
        """The folder to write files to."""
        return self._folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._descriptor is None:
            return
        _remove(self._folder, self._lock)
        os.close(self._descriptor)
        self._descriptor = None


def open_staging(parent: Path) -> FolderStaging:
    """Create a staging folder below `parent`. Raises Failure(STORAGE, INTERNAL)."""
    with storage_errors(parent):
        staging = reserve_staging(parent)
        try:
            staging.path.mkdir()
        except BaseException:
            staging.__exit__()
            raise
        return staging


def reserve_staging(parent: Path) -> FolderStaging:
    """Return a staging folder whose `path` does not exist yet: a target for a rename. Needs no block on a full disk."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / secrets.token_hex(8)
        lock = folder.with_suffix(_LOCK)
        descriptor = try_lock(lock)
        if descriptor is None:
            continue
        if _is_at(descriptor, lock):
            return FolderStaging(folder, lock, descriptor)
        os.close(descriptor)  # a sweep removed the file before it was locked


def sweep_staging(parent: Path) -> None:
    """Remove the staging folders of dead processes below `parent`."""
    with suppress(OSError):
        for entry in sorted(parent.iterdir()):
            with suppress(OSError):
                _sweep(entry)


def _sweep(entry: Path) -> None:
    lock = entry.with_suffix(_LOCK)
    if not lock.exists():  # a lock is created before its folder and removed after it: this is a leftover
        remove_tree(entry)
        return
    descriptor = try_lock(lock)
    if descriptor is None:
        return
    _remove(entry.with_suffix(""), lock)
    os.close(descriptor)


def _remove(folder: Path, lock: Path) -> None:
    remove_tree(folder)
    lock.unlink(missing_ok=True)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
