"""Who a server is to its TLS clients, and which clients it accepts: checked contents of the files.

TlsFiles ─> Contents ─> Identity: SSLContexts for our own connections, the same bytes for the gRPC library
"""

from __future__ import annotations

import binascii
import calendar
import os
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from millstream.services.errors import invalid
from millstream.services.tls.files import CERTIFICATE, CLIENT_CA, KEY, Contents, TlsFiles

#: certificates of a server: its own and the intermediates, which every handshake sends; a longer file is a bundle of
#: authorities
CHAIN_MAX = 16
#: OpenSSL's reasons, in words
_REASONS = {
    "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
    "KEY_TYPE_MISMATCH": "the key is not that of the certificate",
    "NO_CERTIFICATE_ASSIGNED": "the key is not that of the certificate",
    "EE_KEY_TOO_SMALL": "the key is too short",
    "CA_MD_TOO_WEAK": "the certificate is signed with a hash that is broken",
}


_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]*-----END CERTIFICATE-----")
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17
#: format of each type of time; two digits of a year mean 1950 to 2049, but 1969 to 2068 to strptime
_GENERALIZED = "%Y%m%d%H%M%SZ"
_PIVOT = b"50"


class Validity(NamedTuple):
    """The instants between which a certificate is valid, in seconds since the epoch."""

    begins: float
    ends: float


def pem_blocks(content: bytes) -> list[str]:
    """Return the certificates in a file, without the text around them."""
    return [block.decode("ascii") for block in _PEM.findall(content)]


def validity(pem: str) -> Validity:
    """Return the validity of a certificate. Raises ValueError for text that is none."""
    try:
        der = ssl.PEM_cert_to_DER_cert(pem)
        _, certificate, _ = _element(der, 0)
        _, at, _ = _element(der, certificate)  # TBSCertificate
        tag, _, end = _element(der, at)
        if tag == _VERSION:
            at = end
        for _ in ("serialNumber", "signature", "issuer"):
            _, _, at = _element(der, at)
        tag, at, _ = _element(der, at)
        if tag != _SEQUENCE:
            raise ValueError("it has no validity")
        begins, at = _time(der, at)
        ends, _ = _time(der, at)
    except (IndexError, binascii.Error) as error:
        raise ValueError(f"it is cut off or damaged: {error}") from error
    return Validity(begins, ends)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the element at `at`, and where its content begins and ends. Raises IndexError."""
    tag, length = der[at], der[at + 1]
    begin = at + 2
    if length & 0x80:
        count = length & 0x7F
        length = int.from_bytes(der[begin : begin + count], "big")
        begin += count
    if begin + length > len(der):
        raise IndexError("an element is longer than the certificate")
    return tag, begin, begin + length


def _time(der: bytes, at: int) -> tuple[float, int]:
    tag, begin, end = _element(der, at)
    digits = der[begin:end]
    if tag == _UTC_TIME:
        digits = (b"20" if digits < _PIVOT else b"19") + digits
    return float(calendar.timegm(time.strptime(digits.decode("ascii"), _GENERALIZED))), end


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate that fits its key, and the authorities of clients.

    Attributes:
        contents: of the files.
        validity: of the certificate.
        context: for connections of HTTP/1.1.
        h2_context: for connections of HTTP/2.
        shared_context: for a port of both; a client that speaks both gets HTTP/1.1, since HTTP/2 is gRPC's alone.
    """

    contents: Contents
    validity: Validity
    context: ssl.SSLContext
    h2_context: ssl.SSLContext
    shared_context: ssl.SSLContext

    def expired(self, now: float) -> bool:
        """Whether the certificate is no longer valid at `now`, in seconds since the epoch."""
        return self.validity.ends <= now

    def premature(self, now: float) -> bool:
        """Whether the certificate is not valid yet at `now`."""
        return now < self.validity.begins


class _Encrypted(Exception):
    """The key needs a passphrase."""


def load_identity(files: TlsFiles) -> Identity:
    """Return what the files say now. Raises Failure(INVALID) that names the file and says what is wrong."""
    return check_identity(files, files.read())


def check_identity(files: TlsFiles, contents: Contents) -> Identity:
    """Return the identity in `contents`, which was read from `files`. Raises Failure(INVALID)."""
    chain = pem_blocks(contents.certificate)
    if not chain:
        raise invalid(f"{CERTIFICATE}: {files.certificate} contains no certificate in PEM form")
    if len(chain) > CHAIN_MAX:
        raise invalid(
            f"{CERTIFICATE}: {files.certificate} contains {len(chain)} certificates, and at most {CHAIN_MAX} are "
            "allowed: the server's own, then its intermediates"
        )
    if b"PRIVATE KEY-----" not in contents.key:
        raise invalid(f"{KEY}: {files.key} contains no private key in PEM form")
    try:
        dates = validity(chain[0])
    except ValueError as error:
        raise invalid(f"{CERTIFICATE}: {files.certificate}: its first certificate cannot be read: {error}") from error
    return Identity(
        contents,
        dates,
        _context(files, contents, "http/1.1"),
        _context(files, contents, "h2"),
        _context(files, contents, "http/1.1", "h2"),
    )


def _context(files: TlsFiles, contents: Contents, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # which costs the server a signature each time a client asks
    context.set_alpn_protocols(protocols)  # the first one that the client knows, too
    # From memory, and not from the files: they may have changed since they were read.
    with _in_memory(contents.certificate) as certificate, _in_memory(contents.key) as key:
        try:
            context.load_cert_chain(certificate, key, password=_refuse_passphrase)
        except _Encrypted:
            raise invalid(f"{KEY}: {files.key} is encrypted: store the key without a passphrase") from None
        except ssl.SSLError as error:
            reason = _REASONS.get(error.reason or "", f"OpenSSL cannot use them ({error.reason or error})")
            raise invalid(f"{CERTIFICATE} {files.certificate}, {KEY} {files.key}: {reason}") from error
    if contents.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        authorities = pem_blocks(contents.client_ca)
        if not authorities:
            raise invalid(f"{CLIENT_CA}: {files.client_ca} contains no certificate in PEM form")
        try:
            context.load_verify_locations(cadata="\n".join(authorities))
        except ssl.SSLError as error:
            raise invalid(f"{CLIENT_CA}: {files.client_ca} cannot be used: {error.reason or error}") from error
    return context


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of a file with `content` that is on no disk: the ssl module reads keys from files only."""
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _refuse_passphrase() -> NoReturn:
    """Stand in for OpenSSL's own question, which would wait for an answer on the terminal."""
    raise _Encrypted
