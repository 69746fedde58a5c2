"""The files that the settings name for TLS, read as a whole and with a limit."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from millstream.services.errors import Failure, invalid
from millstream.services.settings import Settings

CERTIFICATE, KEY, CLIENT_CA = "MILLSTREAM_TLS_CERT_FILE", "MILLSTREAM_TLS_KEY_FILE", "MILLSTREAM_TLS_CLIENT_CA_FILE"
#: bytes of one file: the certificates of all public authorities together take a quarter
FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Contents:
    """What the files contained at one time. `client_ca` None: clients need no certificate."""

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of the listeners: the certificate and its chain, its key, and the authorities of clients."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, settings: Settings) -> TlsFiles | None:
        """Return the files that the settings name; None: the listeners do without TLS. Raises Failure(INVALID)."""
        certificate, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
        if certificate is None and key is None:
            if client_ca is not None:
                raise invalid(f"{CLIENT_CA} is set without a certificate: set {CERTIFICATE} and {KEY}, or unset it")
            return None
        if key is None:
            raise invalid(f"{CERTIFICATE} is set without {KEY}: set it to the file of the certificate's private key")
        if certificate is None:
            raise invalid(f"{KEY} is set without {CERTIFICATE}: set it to the file of the certificate and its chain")
        return cls(certificate.expanduser(), key.expanduser(), None if client_ca is None else client_ca.expanduser())

    def read(self) -> Contents:
        """Return what the files contain. Raises Failure(INVALID) that names the file which cannot be read."""
        return Contents(
            read_file(self.certificate, CERTIFICATE),
            read_file(self.key, KEY),
            None if self.client_ca is None else read_file(self.client_ca, CLIENT_CA),
        )


def read_file(path: Path, variable: str) -> bytes:
    """Return the content of a regular file of at most FILE_BYTES_MAX. Raises Failure(INVALID)."""
    try:
        # Without waiting: opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _unusable(variable, path, "it is not a regular file")
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unusable(variable, path, error.strerror or str(error)) from error
    if len(content) > FILE_BYTES_MAX:
        raise _unusable(variable, path, f"it is larger than {FILE_BYTES_MAX} bytes")
    return content


def _unusable(variable: str, path: Path, why: str) -> Failure:
    return invalid(f"{variable}: {path} cannot be read: {why}")
