"""Makes the files of an installation (models, logs, sockets) readable only by their owner."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

_OWNER_ONLY_UMASK = 0o077
_OWNER_ONLY_FOLDER = 0o700
_OWNER_ONLY_FILE = 0o600


def create_files_private() -> None:
    """Set the umask so that new files and folders are only for their owner; to be called when a process starts."""
    os.umask(_OWNER_ONLY_UMASK)


def make_private_folder(folder: Path) -> None:
    """Create `folder` and missing parents, and deny other users access if it is our own. Raises OSError."""
    folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
    # A folder of another user, such as a mounted volume that root created, keeps its mode.
    with suppress(PermissionError):
        folder.chmod(_OWNER_ONLY_FOLDER)


def create_private_file(path: Path, content: bytes) -> None:
    """Create a file with `content`, whole or not at all; one that is there already keeps its own. Raises OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER_ONLY_FILE)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was first, and what it wrote counts
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
