"""private_files: what an installation keeps (models, logs, sockets) is readable by its owner alone."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_OWNER_ONLY_UMASK = 0o077
_OWNER_ONLY_FOLDER = 0o700


def create_files_private() -> None:
    """From now on files and folders that this process makes are for their owner alone. For the start of a process."""
    os.umask(_OWNER_ONLY_UMASK)


def make_private_folder(folder: Path) -> None:
    """Make `folder` and its parents where they are missing; close a folder of our own to others. Raises OSError."""
    folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    # Somebody else's folder, such as a mounted volume that root made, keeps what its owner chose.
    with suppress(PermissionError):
        folder.chmod(_OWNER_ONLY_FOLDER)
