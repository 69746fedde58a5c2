"""certificate: the certificates in a PEM file, and when they are valid. Pure.

Python's ssl module tells the validity only of a certificate that a peer sent and that was verified.
Sources: RFC 7468 (PEM); RFC 5280 4.1 (Certificate, Validity); X.690 8.1 (identifier and length octets).
"""

from __future__ import annotations

import binascii
import calendar
import re
import ssl
import time
from typing import NamedTuple

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
