"""reply_blocks: the header blocks that begin and end the reply to a call. Pure.

Source: gRPC over HTTP2, "Responses".
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import lru_cache

from millstream.gateway.http2.header_blocks import encode

_OK = b"\x88"  # ":status: 200" of the static table (RFC 7541, appendix A)
_CONTENT_TYPE = (b"content-type", b"application/grpc")
#: begins the reply to a call
HEAD = _OK + encode([_CONTENT_TYPE])
_STATUS_OK = encode([(b"grpc-status", b"0")])
_REQUEST_ID = encode([(b"x-request-id", b"")])[:-1]  # without the length of its value
_ACCEPTED = (b"grpc-accept-encoding", b"identity, deflate, gzip")
#: of a status message as sent, which escapes may lengthen; the rest is cut off
MESSAGE_BYTES_MAX = 8192
#: bytes of a status message that are sent as they are
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}

Pairs = Iterable[tuple[str, str | bytes]]


@lru_cache(maxsize=4)
def head_of(encoding: bytes) -> bytes:
    """Return the block that begins a reply whose messages may be in `encoding`."""
    return HEAD + encode([(b"grpc-encoding", encoding)])


def trailers(code: int, message: str = "", metadata: Pairs = ()) -> bytes:
    """Return the block that ends a reply.

    Args:
        code: the status code; 0: OK.
        message: for people.
        metadata: trailing metadata; the values of names that end with `-bin` are bytes.
    """
    block = encode([(b"grpc-status", b"%d" % code)]) if code else _STATUS_OK
    if message:
        block += encode([(b"grpc-message", escaped(message))])
    return block + encode([(name.encode("ascii"), _value(name, value)) for name, value in metadata])


def ok_trailers(request_id: bytes) -> bytes:
    """Return the block that ends a reply, with the request id, which is shorter than 127 bytes."""
    return b"%b%b%c%b" % (_STATUS_OK, _REQUEST_ID, len(request_id), request_id)


def trailers_only(code: int, message: str, metadata: Pairs = (), *, encodings: bool = False) -> bytes:
    """Return the block of a reply without messages. `encodings`: it lists those that this server reads."""
    return (encode_list() if encodings else HEAD) + trailers(code, message, metadata)


def encode_list() -> bytes:
    """Return the block that begins a reply and lists the encodings that this server reads."""
    return HEAD + encode([_ACCEPTED])


def http_only(status: int) -> bytes:
    """Return the block of a reply to a request that is no call of gRPC."""
    return encode([(b":status", b"%d" % status)])


def escaped(message: str) -> bytes:
    """Return a status message in percent-encoding, cut off between two of its characters."""
    parts: list[bytes] = []
    size = 0
    for character in message:
        octets = character.encode("utf-8", "backslashreplace")
        part = b"".join([bytes((octet,)) if octet in _PLAIN else b"%%%02X" % octet for octet in octets])
        size += len(part)
        if size > MESSAGE_BYTES_MAX:
            break
        parts.append(part)
    return b"".join(parts)


def _value(name: str, value: str | bytes) -> bytes:
    if name.endswith("-bin"):
        return base64.b64encode(value if isinstance(value, bytes) else value.encode()).rstrip(b"=")
    return value if isinstance(value, bytes) else value.encode("ascii", "replace")
