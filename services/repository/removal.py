"""Removes folders that a process which was taken over by a model may have filled."""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from pathlib import Path

_OWN_MODE = 0o700


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
