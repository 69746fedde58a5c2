"""The name of an installation in Redis and in shared memory.

MILLSTREAM_INSTALLATION_NAME ─> else the repository's file .installation ─> else a random name, written to that file
Processes that share a repository therefore share a queue, on any number of machines; other processes do not.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.repository.disk import fsync, storage_errors
from millstream.services.settings import INSTALLATION_PATTERN, Settings

FILE = ".installation"
_NAME_BYTES_MAX = 1024  # of the file .installation that are read


def installation_name(settings: Settings) -> str:
    """Return the name in the settings, else the name in the repository; a new name is stored if there is none.

    Raises Failure: STORAGE, INTERNAL when a new name cannot be written, or the file contains no name.
    """
    return settings.installation_name or _kept(settings.repository_dir.expanduser().absolute())


def shm_prefix(settings: Settings) -> str:
    """Return the prefix of the names of our shared memory, up to a dot. It differs for each home.

    Raises as `installation_name` does.
    """
    home = os.fsencode(settings.home.expanduser().resolve())
    return f"{installation_name(settings)}-{hashlib.sha256(home).hexdigest()[:8]}"


def metrics_dir(settings: Settings) -> Path:
    """Return the folder in which the processes that a supervisor runs share their metrics; it makes the folder.

    It is in memory: writing to a page under write-back blocks. Raises as `installation_name` does.
    """
    memory = settings.shm_dir if settings.shm_dir.is_dir() else settings.home.resolve() / "run"
    return memory / f"{shm_prefix(settings)}.metrics"


def shared_metrics(settings: Settings) -> Path | None:
    """Return that folder if there is one; None: no supervisor runs here, and each process has metrics of its own."""
    folder = metrics_dir(settings)
    return folder if folder.is_dir() and folder.stat().st_uid == os.getuid() else None


def _kept(repository: Path) -> str:
    path = repository / FILE
    with storage_errors(repository):
        try:
            return _read(path)
        except FileNotFoundError:
            _create(path, f"millstream-{secrets.token_hex(6)}")
        return _read(path)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        name = file.read(_NAME_BYTES_MAX).decode(errors="replace").strip()
    if not re.fullmatch(INSTALLATION_PATTERN, name):
        raise Failure(
            Code.INTERNAL,
            f"{path} holds no installation name: remove it while nothing runs, or set MILLSTREAM_INSTALLATION_NAME",
        )
    return name


def _create(path: Path, name: str) -> None:
    """Write the file unless it exists, atomically: processes on several machines may do this at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{FILE}.{secrets.token_hex(8)}")
    try:
        temporary.write_text(name + "\n", encoding="ascii")
        fsync(temporary)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)
