"""Shared memory files of an installation: whatever is there before the start or after the end belongs to nobody."""

from __future__ import annotations

import contextlib
from pathlib import Path


def remove_segments(folder: Path, instance: str) -> int:
    """Remove the files `<instance>-*` in `folder`; returns how many there were."""
    removed = 0
    for path in folder.glob(f"{instance}-*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed += 1
    return removed
