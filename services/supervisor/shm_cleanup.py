"""Shared memory files and folders of an installation: whatever is there before the start or after the end belongs to nobody."""

from __future__ import annotations

import contextlib
import glob
import shutil
from pathlib import Path


def remove_segments(folder: Path, prefix: str) -> int:
    """Remove all that is called `<prefix>.*` in `folder`; returns how many there were."""
    removed = 0
    for path in folder.glob(f"{glob.escape(prefix)}.*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed += 1
    return removed
