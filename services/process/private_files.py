"""private_files: makes the files of an installation (models, logs, sockets) readable only by their owner."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_OWNER_ONLY_UMASK = 0o077
_OWNER_ONLY_FOLDER = 0o700


def create_files_private() -> None:
    """Set the umask so that new files and folders are only for their owner; to be called when a process starts."""
    os.umask(_OWNER_ONLY_UMASK)


def make_private_folder(folder: Path) -> None:
    """Create `folder` and missing parents, and deny other users access if it is our own. Raises OSError."""
    folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    # A folder of another user, such as a mounted volume that root created, keeps its mode.
    with suppress(PermissionError):
        folder.chmod(_OWNER_ONLY_FOLDER)
