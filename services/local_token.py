"""The token with which programs of this machine's operator administer an installation.

supervisor, or a gateway alone ─> <home>/run/token, for its owner only ─> CLI and client send it, gateways check it

The file is a whole header, so that `curl -H @.millstream/run/token` sends it, and it is in no list of processes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from millstream.services.process.private_files import create_private_file

PREFIX = "mt_"
_HEADER = "Authorization: Bearer "
_BYTES_MAX = 256  # of the file that are read


def token_file(home: Path) -> Path:
    """Return the path of the token of a home."""
    return home.expanduser().absolute() / "run" / "token"


def read_token(home: Path) -> str | None:
    """Return the token of a home; None: there is none, or other users may read or have written it."""
    try:
        with open(os.open(token_file(home), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or os.geteuid() not in {status.st_uid, 0}:
                return None
            text = file.read(_BYTES_MAX).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    token = text.removeprefix(_HEADER)
    return token if token.startswith(PREFIX) and token.isprintable() and " " not in token else None


def keep_token(home: Path) -> str | None:
    """Return the token of a home; a new one if it has none that is private. None: it cannot be written.

    It outlives restarts, as clients do. Who deletes the file gets another at the next start.
    """
    path = token_file(home)
    with suppress(OSError):  # an installation also starts where the file cannot be written: operators then need a key
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # gateways that start together share one token
            if read_token(home) is None:
                path.unlink(missing_ok=True)
                create_private_file(path, f"{_HEADER}{PREFIX}{secrets.token_urlsafe(32)}\n".encode())
        finally:
            os.close(lock)
    return read_token(home)
