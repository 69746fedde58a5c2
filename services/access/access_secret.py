"""access_secret: the secret from which the secrets of keys are derived.

MILLSTREAM_ACCESS_SECRET ─> else the file access.key of the home ─> else a random one, written to that file
"""

from __future__ import annotations

import secrets

from millstream.services.errors import Code, Failure
from millstream.services.process.private_files import create_private_file
from millstream.services.repository.disk import fsync, storage_errors
from millstream.services.settings import Settings

FILE = "access.key"
BYTES = 32
_BYTES_MAX = 1024  # of the file that are read


def access_secret(settings: Settings) -> bytes:
    """Return the access secret of this installation; a new one is stored if there is none. Blocking.

    Raises Failure: STORAGE, INTERNAL when it cannot be written, or the file is empty.
    """
    if settings.access_secret is not None:
        return settings.access_secret.get_secret_value().encode()
    path = settings.home.expanduser().absolute() / FILE
    with storage_errors(path.parent):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            create_private_file(path, secrets.token_hex(BYTES).encode())
            fsync(path.parent)
        with path.open("rb") as file:
            content = file.read(_BYTES_MAX).strip()
    if len(content) < BYTES:
        raise Failure(Code.INTERNAL, f"{path} is damaged: restore it from a backup, or delete it and rotate all keys")
    return content
