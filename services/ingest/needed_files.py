"""What is kept of an upload: the files that the version needs. Blocking."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from millstream.services.errors import Code, Failure


def keep_only(folder: Path, files: Collection[str]) -> None:
    """Remove everything below `folder` but `files`, and folders that are empty then. Links are not followed.

    Args:
        folder: a staging folder, whose content somebody else made.
        files: paths below it.

    Raises:
        Failure: INTERNAL, for one of `files` that is missing or no regular file.
        OSError: something cannot be removed.
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
            if path.is_symlink():  # os.walk counts a link to a folder as one
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
    if missing:
        shown = min(missing).relative_to(folder)
        raise Failure(Code.INTERNAL, f"the model check names {str(shown)[:200]!a}, which is not a file of the upload")
