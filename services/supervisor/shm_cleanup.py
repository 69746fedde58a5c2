"""Removes an installation's leftover files in shared memory, before its start and after its end."""

from __future__ import annotations

import contextlib
import glob
import shutil
from pathlib import Path


def remove_segments(folder: Path, prefix: str) -> int:
    """Remove all files and folders named `<prefix>.*` in `folder`; return their number."""
    removed = 0
    for path in folder.glob(f"{glob.escape(prefix)}.*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed += 1
    return removed
