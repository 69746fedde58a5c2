"""What the header fields of a request say about its call. Pure.

Source: gRPC over HTTP2, "Requests".
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import NamedTuple

from millstream.gateway.http2.header_blocks import Headers, check_request
from millstream.services.traceparent import HEADER, usable_traceparent

Metadata = tuple[tuple[str, str | bytes], ...]

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONTENT_TYPE = re.compile(rb"application/grpc([+;].*)?")
#: fields of the protocol itself, which are not metadata
_RESERVED = frozenset({b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"})
#: metadata that changes how a call is answered, apart from keys
_CHANGING = frozenset({b"accept-encoding", b"x-request-id"})
#: encodings that messages may have
ENCODINGS = (b"identity", b"deflate", b"gzip")


class CallHead(NamedTuple):
    """The header fields of a call."""

    method: str  # its full name: /service/Method
    metadata: Metadata
    timeout_s: float | None  # None: no deadline
    encoding: bytes  # of compressed messages
    accepts: frozenset[bytes]  # encodings that the client reads
    http_status: int = 200  # another: this is not a call of gRPC
    fault: str = ""  # what is wrong with the fields, for INTERNAL
    plain: bool = True  # whether no metadata changes how the call is answered
    traceparent: bytes | None = None  # if usable: the caller's trace
    credential: bytes | None = None  # authorization; without it, x-api-key


def read_head(headers: Headers) -> CallHead:
    """Return what decoded fields say. Raises ValueError if they are no request of HTTP/2."""
    check_request(headers)
    fields = dict(headers)
    fault = ""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name not in _RESERVED and not name.startswith(b":"):
            try:
                metadata += _entries(name, value)
            except ValueError:
                fault = f"the metadata '{name.decode('ascii', 'replace')}' is malformed"
    timeout_s = None
    if b"grpc-timeout" in fields:
        timeout = _TIMEOUT.fullmatch(fields[b"grpc-timeout"])
        if timeout is None:
            fault = "grpc-timeout is malformed"
        else:
            timeout_s = int(timeout[1]) * _UNIT_S[timeout[2]]
    return CallHead(
        fields[b":path"].decode("ascii", "replace"),
        tuple(metadata),
        timeout_s,
        fields.get(b"grpc-encoding", b"identity"),
        frozenset(part.strip() for part in fields.get(b"grpc-accept-encoding", b"identity").split(b",")),
        _http_status(fields),
        fault,
        _CHANGING.isdisjoint(fields),
        usable_traceparent(fields[HEADER]) if HEADER in fields else None,
        credential_of(headers),
    )


def credential_of(fields: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return authorization, or else x-api-key; None: neither was sent. One that was sent twice is both: no key.

    Source: RFC 9110, section 5.3 (repeated fields are one with commas).
    """
    sent = list(fields)
    for wanted in (b"authorization", b"x-api-key"):
        values = [value for name, value in sent if name == wanted]
        if values:
            return b", ".join(values)
    return None


def _http_status(fields: dict[bytes, bytes]) -> int:
    if fields[b":method"] != b"POST":
        return 405
    return 200 if _CONTENT_TYPE.fullmatch(fields.get(b"content-type", b"")) else 415


def _entries(name: bytes, value: bytes) -> list[tuple[str, str | bytes]]:
    """Return the metadata of a field: one entry, or several of a binary one that were joined. Raises ValueError.

    Binary values are in base64, perhaps without padding, and may be joined with commas.
    """
    key = name.decode("ascii")
    if not name.endswith(b"-bin"):
        return [(key, value.decode("ascii"))]
    try:
        parts = [part.strip() for part in value.split(b",")]
        return [(key, base64.b64decode(part + b"=" * (-len(part) % 4), validate=True)) for part in parts]
    except binascii.Error as error:
        raise ValueError(str(error)) from None
