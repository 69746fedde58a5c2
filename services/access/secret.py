"""The texts of keys: `mr_<id>_<secret>`, how a secret is derived, and how it is checked.

access secret, id, salt ─HMAC-SHA-256─> secret ─SHA-256─> hash, which is stored with the salt

A secret has 256 bits that no one can guess, so a plain hash protects it. Requests signed with AWS SigV4 prove the
secret without sending it: to verify them, a gateway derives the secret again from the access secret, which is not in
the repository: MILLSTREAM_ACCESS_SECRET, or a random one in the file access.key of the home.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

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


PREFIX = "mr_"
ID_BYTES = 8
SALT_BYTES = 16
#: characters of a key; a longer text is none
KEY_CHARACTERS_MAX = 128
_KEY = re.compile(r"mr_([0-9a-f]{16})_([A-Za-z0-9_\-]{43})")
_ID = re.compile(r"[0-9a-f]{16}")
_BEARER = "bearer "


class KeyText(NamedTuple):
    """The parts of a key as its holder sends it."""

    id: str
    secret: str


def parse_key(text: str) -> KeyText | None:
    """Return the parts of `mr_<id>_<secret>`; None if `text` has another form."""
    match = _KEY.fullmatch(text) if len(text) <= KEY_CHARACTERS_MAX else None
    return None if match is None else KeyText(match[1], match[2])


def is_id(text: str) -> bool:
    """Whether `text` has the form of a key's id."""
    return _ID.fullmatch(text) is not None


def format_key(key_id: str, secret: str) -> str:
    """Return the key as its holder sends it."""
    return f"{PREFIX}{key_id}_{secret}"


def bearer_of(header: bytes) -> str:
    """Return the key in a header: `Bearer KEY` of Authorization, or KEY alone of X-API-Key."""
    text = header.decode("latin-1").strip()
    return text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else text


def derive_secret(access_secret: bytes, key_id: str, salt: str) -> str:
    """Return the secret that belongs to a salt of a key, 43 characters of base64url."""
    digest = hmac.digest(access_secret, f"millstream key\0{key_id}\0{salt}".encode(), "sha256")
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def hash_secret(secret: str) -> str:
    """Return what is stored of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def same_text(one: str, other: str) -> bool:
    """Whether two texts are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
