"""message_framing: cuts the data of a stream into gRPC messages, and writes their prefix. Pure.

Source: gRPC over HTTP2, "Length-Prefixed-Message": a byte that tells whether the message is compressed, its length in
4 bytes, the message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

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
