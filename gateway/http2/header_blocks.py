"""Reads header blocks (HPACK), remembering those that clients send again and again, checks the fields of
requests and trailers, and writes blocks.

A block that does not change the dynamic table means the same until another block changes the table: until then its
bytes are looked up. gRPC clients send the same few bytes for each call, because all fields are in the table by then.

Source: RFC 7541; RFC 9113, sections 8.1 to 8.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError

from millstream.gateway.http2.events import ConnectionFault, ErrorCode

#: names in lower case, values as sent
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")

#: Blocks remembered for a connection. A full memory is emptied.
BLOCKS_MAX = 16
#: longer blocks are decoded each time
BLOCK_BYTES_MAX = 1024
_ENTRY_BYTES = 32  # what a field counts beside its name and value (RFC 7541, section 4.1)

#: octets of an integer after its prefix; the decoder would read one of 32 KiB for a second
_INTEGER_OCTETS_MAX = 5
_INDEXED, _INCREMENTAL, _SIZE_UPDATE = 0x80, 0x40, 0x20


class UnfinishedBlock:
    """A header block whose CONTINUATION frames have yet to arrive."""

    __slots__ = ("ended", "fragments", "size", "stream")

    def __init__(self, stream: int, fragment: bytes, *, ended: bool) -> None:
        self.stream = stream
        self.ended = ended
        self.fragments = [fragment]
        self.size = len(fragment)


class HeaderReader(Generic[T]):
    """Decodes the header blocks of one connection.

    Args:
        interpret: turns decoded fields into what the caller wants; its results are remembered, too.
        list_bytes_max: limit on decoded fields, as RFC 9113 section 6.5.2 counts them; larger lists are None.
        bomb_bytes: the same limit, beyond which the connection ends.
    """

    __slots__ = ("_decoder", "_interpret", "_list_bytes_max", "_remembered", "decoded_bytes")

    def __init__(self, interpret: Callable[[Headers], T], list_bytes_max: int, bomb_bytes: int) -> None:
        self._interpret = interpret
        self._list_bytes_max = list_bytes_max
        self._decoder = Decoder(bomb_bytes)
        self._remembered: dict[bytes, T | None] = {}
        self.decoded_bytes = 0  # of all blocks that were not remembered

    def read(self, block: bytes) -> T | None:
        """Return what `interpret` made of a block; None: it is over the limit, and was read and dropped.

        Raises ConnectionFault: COMPRESSION_ERROR; ENHANCE_YOUR_CALM for a header bomb. Errors of `interpret` pass, when
        the table is in order.
        """
        try:
            return self._remembered[block]
        except KeyError:
            pass
        headers, changed = self._decode(block)
        size = sum([len(name) + len(value) + _ENTRY_BYTES for name, value in headers])
        known = None if size > self._list_bytes_max else self._interpret(headers)
        if not changed and len(block) <= BLOCK_BYTES_MAX:
            if len(self._remembered) >= BLOCKS_MAX:
                self._remembered.clear()
            self._remembered[block] = known
        return known

    def fields(self, block: bytes) -> Headers:
        """Return the fields of a block that is not interpreted, as of trailers. Raises ConnectionFault.

        A block is read also if its fields are not used: the next blocks rest on its table.
        """
        return self._decode(block)[0]

    def _decode(self, block: bytes) -> tuple[Headers, bool]:
        """Return the fields of a block, and whether it changed the table."""
        self.decoded_bytes += len(block)
        changes = changes_table(block)  # also refuses what would be slow to decode
        if changes:
            self._remembered.clear()
        try:
            fields = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large") from None
        except HPACKError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"malformed header block: {error}") from None
        return [(bytes(name), bytes(value)) for name, value in fields], changes


def changes_table(block: bytes) -> bool:
    """Whether a block inserts into the dynamic table or resizes it. Raises ConnectionFault(COMPRESSION_ERROR).

    Source: RFC 7541, section 6.
    """
    at, end, changes = 0, len(block), False
    while at < end:
        first = block[at]
        if first & _INDEXED:
            _, at = _integer(block, at, 7)
        elif first & _INCREMENTAL:
            changes = True
            at = _literal(block, at, 6)
        elif first & _SIZE_UPDATE:
            changes = True
            _, at = _integer(block, at, 5)
        else:
            at = _literal(block, at, 4)
    if at > end:
        raise _malformed("ends within a field")
    return changes


def _literal(block: bytes, at: int, prefix_bits: int) -> int:
    """Return the position after a literal field at `at`. Source: RFC 7541, section 6.2."""
    name, at = _integer(block, at, prefix_bits)
    if not name:
        size, at = _integer(block, at, 7)
        at += size
    size, at = _integer(block, at, 7)
    return at + size


def _integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """Return the integer at `at` and the position after it. Source: RFC 7541, section 5.1."""
    if at >= len(block):
        raise _malformed("ends within a field")
    most = (1 << prefix_bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for place, octet in enumerate(block[at : at + _INTEGER_OCTETS_MAX]):
        value += (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value, at + place + 1
    raise _malformed("has an integer that does not end")


def _malformed(what: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"a header block {what}")


#: The first header block that a server sends begins with this: it sets the size of our dynamic table to 0, so that no
#: setting of the client can require another size (RFC 7541, section 4.2).
NO_TABLE = b"\x20"


def encode(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a header block of literal fields without indexing: it means the same whenever it is sent.

    Source: RFC 7541, section 6.2.2.
    """
    return b"".join([b"\x00" + _string(name) + _string(value) for name, value in headers])


def _string(text: bytes) -> bytes:
    return _length(len(text)) + text


def _length(size: int) -> bytes:
    """Return a length with a prefix of 7 bits. Source: RFC 7541, section 5.1."""
    if size < 0x7F:
        return bytes((size,))
    octets = bytearray((0x7F,))
    size -= 0x7F
    while size >= 0x80:
        octets.append(size & 0x7F | 0x80)
        size >>= 7
    octets.append(size)
    return bytes(octets)


_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")  # without upper case
_VALUE = re.compile(rb"[^\x00\r\n]*")
_DIGITS = re.compile(rb"[0-9]{1,19}")
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED = frozenset({b":method", b":scheme", b":path"})
#: fields that are about one connection of HTTP/1.1
_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})


def without_blanks(headers: Headers) -> Headers:
    """Return fields whose values have no blanks at their ends, apart from pseudo-header fields.

    RFC 9113, section 8.2.1 forbids such blanks; gRPC lets clients send them and servers strip them.
    """
    return [(name, value if name.startswith(b":") else value.strip(b" \t")) for name, value in headers]


def check_request(headers: Headers) -> None:
    """Check decoded fields. Raises ValueError if the request is malformed."""
    pseudo: set[bytes] = set()
    regular = False
    for name, value in headers:
        if name.startswith(b":"):
            if regular or name not in _PSEUDO or name in pseudo:
                raise ValueError(f"the field {name!r} is unknown, repeated, or behind regular fields")
            pseudo.add(name)
            if not value and name != b":authority":
                raise ValueError(f"the field {name!r} is empty")
            if value != value.strip(b" \t"):
                raise ValueError(f"the field {name!r} has blanks at its ends")
        else:
            regular = True
            _check_name(name, value)
        _check_value(name, value)
    if not pseudo >= _REQUIRED:
        raise ValueError("a pseudo-header field is missing")


def check_trailers(headers: Headers) -> None:
    """Check decoded fields behind the content of a request. Raises ValueError if they are malformed."""
    for name, value in headers:
        _check_name(name, value)  # refuses pseudo-header fields, too
        _check_value(name, value)


def content_length(headers: Headers) -> int | None:
    """Return the content-length; None: there is none. Raises ValueError for one that is no number, or for two."""
    values = {value for name, value in headers if name == b"content-length"}
    if not values:
        return None
    if len(values) > 1 or not _DIGITS.fullmatch(value := values.pop()):
        raise ValueError("the content-length is malformed")
    return int(value)


def _check_name(name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name) or name in _CONNECTION:
        raise ValueError(f"the field {name!r} may not be in HTTP/2")
    if name == b"te" and value != b"trailers":
        raise ValueError("the field 'te' may only be 'trailers'")


def _check_value(name: bytes, value: bytes) -> None:
    if not _VALUE.fullmatch(value):
        raise ValueError(f"the field {name!r} has a malformed value")
