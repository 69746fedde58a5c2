"""Cuts received bytes into frames, a few at a time, reads SETTINGS, and writes frames.

A read of 256 KiB may contain 28,000 frames: cutting them takes long enough for other connections to notice.
Source: RFC 9113, sections 3.4, 4.1 and 6.
"""

from __future__ import annotations

import struct
from collections import deque
from enum import IntEnum

from millstream.gateway.http2.events import ConnectionFault, ErrorCode
from millstream.gateway.http2.stream import WINDOW_BYTES_MAX

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
PRIORITY_BYTES = 5
FRAME_BYTES_MAX = 16384  # the initial SETTINGS_MAX_FRAME_SIZE (RFC 9113, section 6.5.2)
STREAM_ID_MAX = (1 << 31) - 1
JOINED_BYTES_MIN = 4096  # payload of a DATA frame that is joined with others of its stream

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


CUT_MAX = 256  # frames that are cut at once


class ReceivedFrames:
    """Cuts the bytes of one connection, behind the preface, into frames.

    The payload of DATA longer than FRAME_BYTES_MAX is passed on as it arrives, as if the client had sent shorter
    frames. Other frames are held until they are complete. DATA frames of one stream that come together are passed on as
    one, as if the client had sent a longer one: most libraries send frames of 16 KiB, however large the limit is. Short
    ones stay as they are, so that they count.

    Args:
        data_bytes_max: limit on the payload of DATA.
        bytes_max: limit on that of other frames, if it is lower.
    """

    __slots__ = (
        "_bytes_max",
        "_data_bytes_max",
        "_fault",
        "_flags",
        "_frames",
        "_held",
        "_left",
        "_more",
        "_stream",
        "_tail",
        "preface",
    )

    def __init__(self, data_bytes_max: int, bytes_max: int) -> None:
        self.preface = PREFACE  # what is still to arrive of it
        self._data_bytes_max = data_bytes_max
        self._bytes_max = min(bytes_max, data_bytes_max)
        self._frames: deque[Frame] = deque()
        self._fault: ConnectionFault | None = None  # of what follows these frames
        self._held = b""
        self._left = 0  # what is to be passed on of a long frame, with these:
        self._stream = 0
        self._flags = 0
        self._tail = b""  # what then stands for the head of the rest
        self._more = False  # complete frames may be held

    def __bool__(self) -> bool:
        """Whether complete frames wait, or a fault behind them."""
        return bool(self._frames or self._more or self._fault)

    @property
    def partial(self) -> bool:
        """Whether a frame is incomplete."""
        return bool(self._held or self._left)

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        try:
            self._cut(self._after_preface(data) if self.preface else data)
        except ConnectionFault as fault:
            self._fault = fault

    def take(self) -> Frame | None:
        """Return the next frame; None: it is not complete. Raises ConnectionFault behind the last frame before it."""
        if not self._frames:
            if self._fault is not None:
                raise self._fault
            if not self._more:
                return None
            self.add(b"")
            return self.take()
        return self._frames.popleft()

    def clear(self) -> None:
        """Drop what is held."""
        self._frames.clear()
        self._held, self._left, self._more = b"", 0, False
        self._fault = None

    def _after_preface(self, data: bytes) -> bytes:
        size = min(len(data), len(self.preface))
        if data[:size] != self.preface[:size]:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
        self.preface = self.preface[size:]
        return data[size:]

    def _cut(self, data: bytes) -> None:
        """Queue the frames that are complete with `data`, and parts of long DATA, up to CUT_MAX.

        Raises ConnectionFault at a frame over the limit; the frames before it are queued.
        """
        frames = self._frames
        if self._left:
            data = self._pass_on(data, 0)
        elif self._held:
            data = self._held + data
        at, end = 0, len(data)
        while end - at >= HEAD_BYTES and len(frames) < CUT_MAX:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            size = high << 8 | low
            stream &= STREAM_ID_MAX
            if size > FRAME_BYTES_MAX:
                if size > (self._data_bytes_max if kind == DATA else self._bytes_max):
                    raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame has {size} bytes")
                if kind == DATA:
                    begin = self._begin_long(data, at + HEAD_BYTES, size, flags, stream)
                    if begin > end:
                        break
                    data = self._pass_on(data, begin)
                    at, end = 0, len(data)
                    continue
            last = at + HEAD_BYTES + size
            if last > end:
                break
            if kind == DATA and size >= JOINED_BYTES_MIN and end - last > size and not flags:
                at, frame = _joined(data, at, stream)
                frames.append(frame)
                continue
            frames.append((kind, flags, stream, data[at + HEAD_BYTES : last]))
            at = last
        self._more = len(frames) >= CUT_MAX
        self._held = data[at:]

    def _begin_long(self, data: bytes, at: int, size: int, flags: int, stream: int) -> int:
        """Begin to pass on a long DATA frame, and return the position of its content; nothing begins beyond `data`.

        Padding goes with the last byte of the content, in a short frame.
        """
        self._stream, self._flags, self._left, self._tail = stream, flags, size, b""
        if flags & PADDED:
            if at >= len(data):
                self._left = 0
                return at + 1
            padding = data[at]
            self._flags, self._left = 0, size - 2 - padding
            self._tail = head(2 + padding, DATA, flags, stream) + bytes((padding,))
            at += 1
        return at

    def _pass_on(self, data: bytes, at: int) -> bytes:
        """Queue what there is of the content of a long DATA frame at `at`, and return what follows it."""
        size = min(self._left, len(data) - at)
        self._left -= size
        if size:
            flags = self._flags & ~END_STREAM if self._left else self._flags
            self._frames.append((DATA, flags, self._stream, data[at : at + size]))
        rest = data[at + size :]
        return rest if self._left else self._tail + rest


def _joined(data: bytes, at: int, stream: int) -> tuple[int, Frame]:
    """Return the DATA frames at `at`, of which the first is complete, as one, and the position behind them."""
    view, end, joined = memoryview(data), len(data), 0
    pieces: list[memoryview] = []
    while end - at >= HEAD_BYTES and not joined:
        high, low, kind, flags, number = _HEAD.unpack_from(data, at)
        size = high << 8 | low
        last = at + HEAD_BYTES + size
        if kind != DATA or number & STREAM_ID_MAX != stream or flags & ~END_STREAM or last > end:
            break
        if size > FRAME_BYTES_MAX or (size < JOINED_BYTES_MIN and not flags):
            break
        pieces.append(view[at + HEAD_BYTES : last])
        at, joined = last, flags
    return at, (DATA, joined, stream, b"".join(pieces))


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


def header_block(flags: int, payload: bytes) -> bytes:
    """Return what a HEADERS frame has of a header block, without padding and priority. Raises ConnectionFault."""
    block = without_padding(flags, payload)
    if not flags & HAS_PRIORITY:
        return block
    if len(block) < PRIORITY_BYTES:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS end within their priority")
    return block[PRIORITY_BYTES:]


_SETTING = struct.Struct(">HI")
_FRAME_SIZE_MAX = (1 << 24) - 1


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the last value of each identifier, those of unknown identifiers included. Raises ConnectionFault."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS end within a setting")
    values: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for key, value in values:
        if key == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
        if key == Setting.INITIAL_WINDOW_SIZE and value > WINDOW_BYTES_MAX:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is too large")
        if key == Setting.MAX_FRAME_SIZE and not FRAME_BYTES_MAX <= value <= _FRAME_SIZE_MAX:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of its range")
    return dict(values)
