"""Certificates of authorities that a test makes, with the program openssl. Tests that call it are marked `needs`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.kit.tools import program

_KEYS = {
    "ec": ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
    "rsa": ("-newkey", "rsa:2048"),
}
_LEAF = """\
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = DNS:localhost, IP:127.0.0.1
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""
_AUTHORITY = """\
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


class Pair(NamedTuple):
    """A certificate with its chain, and its key."""

    certificate: Path
    key: Path

    def copy_to(self, other: Pair) -> None:
        """Put this pair in the place of another, each file at once."""
        for source, target in zip(self, other, strict=True):
            replace(target, source.read_bytes())


class Authority:
    """An authority that signs certificates for localhost.

    Args:
        folder: Gets its files.
        name: Of the authority.
    """

    def __init__(self, folder: Path, name: str = "authority", signer: Authority | None = None) -> None:
        self.folder = folder
        self.name = name
        self._issued = 0
        self._signer = signer
        self.certificate, self.key = self._sign(name, "ec", _AUTHORITY, 30, signer)

    def issue(self, *, kind: str = "ec", days: int = 30) -> Pair:
        """Return a new certificate with intermediates, and its key. `days` -1: it has expired."""
        self._issued += 1
        pair = self._sign(f"{self.name}-{self._issued}", kind, _LEAF, days, self)
        authority: Authority | None = self
        chain = pair.certificate.read_bytes()
        while authority is not None and authority._signer is not None:
            chain += authority.certificate.read_bytes()
            authority = authority._signer
        pair.certificate.write_bytes(chain)
        return pair

    def _sign(self, name: str, kind: str, extensions: str, days: int, signer: Authority | None) -> Pair:
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        request, extra = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extra.write_text(extensions)
        made = ("-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        _openssl("req", "-new", *_KEYS[kind], "-nodes", *made)
        by = ("-signkey", pair.key) if signer is None else ("-CA", signer.certificate, "-CAkey", signer.key)
        serial = ("-set_serial", f"0x{os.urandom(8).hex()}")
        _openssl(
            "x509",
            "-req",
            "-in",
            request,
            *by,
            *serial,
            "-days",
            str(days),
            "-extfile",
            extra,
            "-out",
            pair.certificate,
        )
        return pair


def encrypted(key: Path) -> bytes:
    """Return a key with a passphrase."""
    return _openssl("pkey", "-in", key, "-aes256", "-passout", "pass:secret")


def replace(path: Path, content: bytes) -> None:
    """Put a file with `content` in the place of another, at once."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def _openssl(*arguments: str | Path) -> bytes:
    done = subprocess.run([program("openssl"), *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
