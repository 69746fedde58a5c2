"""Private folders on the repository's disk, so that one rename publishes their content.

.staging/<random>.lock    locked until the process that owns the folder ends
.staging/<random>/        files of an upload or a load; a process that a model took over may have filled it
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self

from millstream.services.repository.disk import FileLock, storage_errors, try_lock

_LOCK = ".lock"
_OWN_MODE = 0o700


class Staging:
    """A folder of this process, to collect the files of a version in. Leaving the `with` block removes it.

    Args:
        path: the folder; `source/…` and `compiled/…` are written below it.
        lock: on the file beside it.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock: FileLock | None = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            _remove(self.path, self._lock)
            self._lock = None


def open_staging(parent: Path) -> Staging:
    """Create a staging folder below `parent`. Raises Failure(STORAGE, INTERNAL)."""
    with storage_errors(parent):
        staging = reserve_staging(parent)
        try:
            staging.path.mkdir()
        except BaseException:
            staging.__exit__()
            raise
        return staging


def reserve_staging(parent: Path) -> Staging:
    """Return a staging folder whose `path` does not exist yet: a target for a rename. Needs no block on a full disk."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / secrets.token_hex(8)
        path = folder.with_suffix(_LOCK)
        lock = try_lock(path)
        if lock is None:
            continue
        if lock.is_of(path):
            return Staging(folder, lock)
        lock.release()  # a sweep removed the file before it was locked


def sweep_staging(parent: Path) -> None:
    """Remove the staging folders of dead processes below `parent`."""
    with suppress(OSError):
        for entry in sorted(parent.iterdir()):
            with suppress(OSError):
                _sweep(entry)


def _sweep(entry: Path) -> None:
    path = entry.with_suffix(_LOCK)
    if not path.exists():  # a lock is created before its folder and removed after it: this is a leftover
        remove_tree(entry)
    elif (lock := try_lock(path)) is not None:
        _remove(entry.with_suffix(""), lock)


def _remove(folder: Path, lock: FileLock) -> None:
    remove_tree(folder)
    folder.with_suffix(_LOCK).unlink(missing_ok=True)
    lock.release()


def remove_tree(folder: Path) -> None:
    """Remove `folder` with everything in it, also folders without rights and folders nested thousands deep.

    Does nothing if there is none. What the disk refuses to remove is left. Links are not followed.
    """
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir() and not folder.is_symlink():
        with suppress(OSError):
            _remove_flattened(folder)


def _remove_flattened(folder: Path) -> None:
    """Remove `folder`, moving folders in its folders up into it: no path gets long, and no call recurses."""
    folder.chmod(_OWN_MODE)
    while inner := _folders(folder):
        for path in inner:
            path.chmod(_OWN_MODE)
            for moved in _folders(path):
                moved.chmod(_OWN_MODE)  # a folder that gets another parent must be writable
                moved.rename(folder / secrets.token_hex(16))
            for file in list(path.iterdir()):
                file.unlink()
            path.rmdir()
    for file in list(folder.iterdir()):
        file.unlink()
    folder.rmdir()


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
