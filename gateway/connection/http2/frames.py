"""frames: cuts received bytes into frames, and writes frames.

Source: RFC 9113, sections 3.4, 4.1 and 6.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from millstream.gateway.connection.http2.faults import ConnectionFault, ErrorCode

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
#: limit on the payload of a received frame: the initial SETTINGS_MAX_FRAME_SIZE, which we do not change
FRAME_BYTES_MAX = 16384
STREAM_ID_MAX = (1 << 31) - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

_HEAD = struct.Struct(">HBBBI")  # length in 16 + 8 bits, type, flags, stream
_WORD = struct.Struct(">I")
_GOAWAY = struct.Struct(">II")

#: (type, flags, stream, payload)
Frame = tuple[int, int, int, bytes]


class Setting(IntEnum):
    """Identifiers of settings. Source: RFC 9113, section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class FrameReader:
    """Cuts the bytes of one connection into frames. It holds at most one incomplete frame.

    Args:
        bytes_max: limit on the payload of a frame.
    """

    __slots__ = ("_bytes_max", "_held")

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held = b""

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._held)

    def read(self, data: bytes, frames: list[Frame]) -> None:
        """Append the frames that are complete with `data` to `frames`.

        Raises ConnectionFault(FRAME_SIZE_ERROR) at a frame over the limit; the frames before it are appended.
        """
        if self._held:
            data = self._held + data
        at, end = 0, len(data)
        while end - at >= HEAD_BYTES:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            size = high << 8 | low
            if size > self._bytes_max:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame has {size} bytes")
            last = at + HEAD_BYTES + size
            if last > end:
                break
            frames.append((kind, flags, stream & STREAM_ID_MAX, data[at + HEAD_BYTES : last]))
            at = last
        self._held = data[at:]


def head(size_bytes: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the head of a frame with a payload of `size_bytes`."""
    return _HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return head(len(payload), kind, flags, stream) + payload


def settings(values: dict[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join([struct.pack(">HI", key, value) for key, value in values.items()]))


def window_update(stream: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0: of the connection."""
    return frame(WINDOW_UPDATE, 0, stream, _WORD.pack(increment))


def reset(stream: int, code: ErrorCode) -> bytes:
    """Return a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, _WORD.pack(code))


def goaway(last_stream: int, code: ErrorCode, message: str = "") -> bytes:
    """Return a GOAWAY frame. `message`: for people, sent as debug data."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, code) + message.encode("ascii", "replace"))


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of a DATA or HEADERS frame without its padding. Raises ConnectionFault."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame is empty")
    padding = payload[0]
    if padding >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its frame")
    return payload[1 : len(payload) - padding]
