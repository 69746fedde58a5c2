"""Removes the files of an upload that the version does not need. Blocking."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from millstream.services.errors import Code, Failure


def keep_only(folder: Path, files: Collection[str]) -> None:
    """Remove everything below `folder` except `files`, then the folders left empty. Links are not followed.

    Args:
        folder: a staging folder with untrusted content.
        files: paths relative to `folder`.

    Raises:
        Failure: INTERNAL, if one of `files` is missing or is not a regular file.
        OSError: a file or folder cannot be removed.
    """
    kept = {folder / file for file in files}
    missing = set(kept)
    for parent, folders, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent) / name
            if path in kept and stat.S_ISREG(path.lstat().st_mode):
                missing.discard(path)
            else:
                path.unlink()
        for name in folders:
            path = Path(parent) / name
            if path.is_symlink():  # os.walk lists a link to a folder among the folders
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
    if missing:
        first = str(min(missing).relative_to(folder))
        raise Failure(Code.INTERNAL, f"the model check names {first[:200]!a}, which is not a file of the upload")
