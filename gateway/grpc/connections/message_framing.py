"""Cuts the data of a stream into gRPC messages, and writes their prefix and header blocks of replies.
Pure.

Source: gRPC over HTTP2, "Responses" and "Length-Prefixed-Message": a byte that tells whether the message is compressed,
its length in 4 bytes, the message.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable
from functools import lru_cache

from millstream.gateway.http2.header_blocks import encode
from millstream.services.errors import Code, Failure

PREFIX_BYTES = 5
_PREFIX = struct.Struct(">BI")
#: Parts of a message that are shorter are held in one buffer: each part costs an object.
PART_BYTES_MIN = 4096
FIRST_BYTES_MAX = 4096  # of a message, by which memory is chosen for it

#: (whether it is compressed, its bytes); a view where `Allocate` gave memory for it
Message = tuple[bool, bytes | memoryview]
#: returns memory for a message of this size with these first bytes; None: there is none, or it is not wanted
Allocate = Callable[[int, bytes], memoryview | None]


def prefix(size_bytes: int, *, compressed: bool = False) -> bytes:
    """Return the prefix of a message."""
    return _PREFIX.pack(compressed, size_bytes)


class MessageReader:
    """Cuts the data of one stream into messages. It holds at most one incomplete message.

    A message is put together once, when its last bytes are there, unless `allocate` gives memory for it as soon as its
    first bytes are there. Either way large ones are copied once.

    `allocate` is called with each message that comes in several parts; None: never.

    Args:
        bytes_max: limit on a message.
    """

    __slots__ = ("_bytes_max", "_flag", "_left", "_memory", "_parts", "_prefix", "allocate", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.allocate: Allocate | None = None
        self._memory: memoryview | None = None  # of a message that is not complete
        self.held_bytes = 0  # of a message that is not complete
        self._prefix = b""  # of the next message, while it is incomplete
        self._parts: list[bytes | bytearray] = []
        self._flag = 0
        self._left = 0  # bytes of the message that are still to come

    def read(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`. Raises Failure: TOO_LARGE, INVALID."""
        if not self.held_bytes:
            message = self._whole(data)
            if message is not None:
                return [message]
        messages: list[Message] = []
        at = 0
        while at < len(data):
            if not self._left:
                at = self._begin(data, at)
                if len(self._prefix) < PREFIX_BYTES:
                    break
            else:
                at = self._hold(data, at)
            if not self._left:
                messages.append((bool(self._flag), b"".join(self._parts) if self._memory is None else self._memory))
                self._prefix, self._parts, self._memory, self.held_bytes = b"", [], None, 0
        return messages

    def _begin(self, data: bytes, at: int) -> int:
        """Read the prefix of a message at `at`, or what there is of it, and return the position behind it."""
        end = at + PREFIX_BYTES - len(self._prefix)
        self._prefix += data[at:end]
        self.held_bytes = len(self._prefix)
        if self.held_bytes == PREFIX_BYTES:
            self._flag, self._left = _PREFIX.unpack(self._prefix)
            self._check(self._flag, self._left)
        return end

    def _hold(self, data: bytes, at: int) -> int:
        """Hold what there is of the message at `at`, and return the position behind it."""
        length = min(self._left, len(data) - at)
        size_bytes = self.held_bytes - PREFIX_BYTES + self._left
        if self.allocate is not None and self._left == size_bytes > length:
            self._memory = self.allocate(size_bytes, data[at : at + FIRST_BYTES_MAX])
        if self._memory is not None:
            begin = size_bytes - self._left
            self._memory[begin : begin + length] = memoryview(data)[at : at + length]
        else:
            self._keep(data[at : at + length])
        self._left -= length
        self.held_bytes += length
        return at + length

    def _keep(self, part: bytes) -> None:
        """Hold a part of a message for which there is no memory yet."""
        parts = self._parts
        if len(part) >= PART_BYTES_MIN or not parts:
            parts.append(part)
        elif isinstance(parts[-1], bytearray):
            parts[-1] += part
        else:
            parts.append(bytearray(part))

    def _whole(self, data: bytes) -> Message | None:
        """Return the message that `data` is; None: it is not exactly one."""
        if len(data) < PREFIX_BYTES:
            return None
        flag, size = _PREFIX.unpack_from(data)
        if len(data) != PREFIX_BYTES + size:
            return None
        self._check(flag, size)
        return bool(flag), data[PREFIX_BYTES:]

    def _check(self, flag: int, size: int) -> None:
        if flag > 1:
            raise Failure(Code.INTERNAL, f"the prefix of a message has the unknown flags {flag}")
        if size > self._bytes_max:
            raise Failure(Code.TOO_LARGE, f"received message larger than max ({size} vs. {self._bytes_max})")


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
