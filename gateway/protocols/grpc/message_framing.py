"""message_framing: cuts the data of a stream into gRPC messages, and writes their prefix. Pure.

Source: gRPC over HTTP2, "Length-Prefixed-Message": a byte that tells whether the message is compressed, its length in
4 bytes, the message.
"""

from __future__ import annotations

import struct

from millstream.services.errors import Code, Failure

PREFIX_BYTES = 5
_PREFIX = struct.Struct(">BI")

#: (whether it is compressed, its bytes)
Message = tuple[bool, bytes]


def prefix(size_bytes: int, *, compressed: bool = False) -> bytes:
    """Return the prefix of a message."""
    return _PREFIX.pack(compressed, size_bytes)


class MessageReader:
    """Cuts the data of one stream into messages. It holds at most one incomplete message.

    Args:
        bytes_max: limit on a message.
    """

    __slots__ = ("_bytes_max", "_held")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._held)

    def read(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`. Raises Failure: TOO_LARGE, INVALID."""
        held = self._held
        if not held:
            message = self._whole(data)
            if message is not None:
                return [message]
        held += data
        messages: list[Message] = []
        at = 0
        while len(held) - at >= PREFIX_BYTES:
            flag, size = _PREFIX.unpack_from(held, at)
            self._check(flag, size)
            end = at + PREFIX_BYTES + size
            if len(held) < end:
                break
            messages.append((bool(flag), bytes(memoryview(held)[at + PREFIX_BYTES : end])))
            at = end
        if at:
            del held[:at]
        return messages

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
