"""A gRPC client of hand-written HTTP/2 frames, for what client libraries cannot do: stop half-way, never read, flood.

Source: RFC 9113 (frames), RFC 7541 (literal header fields without indexing), gRPC over HTTP2.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
INITIAL_WINDOW_SIZE = 4  # identifier of the setting
WINDOW = 65535
FRAME_BYTES_MAX = 16384
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
WAIT_S = 120.0


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call(stream: int, path: str) -> bytes:
    """Return the HEADERS frame that begins a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, stream, block)


def prefix(size_bytes: int) -> bytes:
    """Return the prefix of an uncompressed gRPC message of this size."""
    return struct.pack(">BI", 0, size_bytes)


def setting(key: int, value: int) -> bytes:
    """Return a SETTINGS frame with one setting."""
    return frame(SETTINGS, 0, 0, struct.pack(">HI", key, value))


def unread(port: int) -> socket.socket:
    """Return a connected socket with a very small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WAIT_S)
    client.connect(("127.0.0.1", port))
    return client


class Connection:
    """A client connection that respects the server's flow control windows and reads only in `take` and `give`."""

    def __init__(self, port: int, *settings: bytes, receive_bytes: int | None = None) -> None:
        self._socket = socket.socket()
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.settimeout(WAIT_S)
        self._socket.connect(("127.0.0.1", port))
        self._received = bytearray()
        self._initial = WINDOW
        self._window = WINDOW
        self._windows: dict[int, int] = {}
        self.ended: set[int] = set()  # streams that the server has ended
        self.said: dict[int, bytes] = {}  # by stream: the last header block; gRPC's message is plain text in it
        self.closed = False  # by the server
        self._last = -1
        self.send(PREFACE, *(settings or (frame(SETTINGS, 0, 0),)))

    def send(self, *frames: bytes) -> None:
        """Send frames. Raises OSError."""
        self._socket.sendall(b"".join(frames))

    def begin(self, path: str) -> int:
        """Begin a call and return its stream."""
        stream = self.number()
        self.send(call(stream, path))
        return stream

    def number(self) -> int:
        """Return the number of a new stream, without sending anything."""
        self._last += 2
        self._windows[self._last] = self._initial
        return self._last

    def give(self, stream: int, data: bytes | memoryview, *, end: bool = False) -> bool:
        """Send data within the windows, waiting for updates; False if the server ended the stream or the connection."""
        left = memoryview(data)
        while left or end:
            while left and min(self._window, self._windows[stream]) <= 0:
                if self.closed or stream in self.ended or not self.take():
                    return False
            size = min(len(left), FRAME_BYTES_MAX, self._window, self._windows[stream])
            last = size == len(left)
            try:
                self.send(frame(DATA, END_STREAM if end and last else 0, stream, bytes(left[:size])))
            except OSError:
                self.closed = True
                return False
            self._window -= size
            self._windows[stream] -= size
            left = left[size:]
            if last:
                return True
        return True

    def take(self, timeout_s: float = WAIT_S) -> list[Frame]:
        """Return the received frames, at least one; empty after `timeout_s` or if the connection is closed."""
        frames: list[Frame] = []
        self._socket.settimeout(timeout_s)
        try:
            while not frames:
                data = self._socket.recv(1 << 16)
                if not data:
                    self.closed = True
                    break
                self._received += data
                frames += self._parse()
        except TimeoutError:
            pass
        except OSError:
            self.closed = True
        finally:
            with suppress(OSError):
                self._socket.settimeout(WAIT_S)
        for one in frames:
            self._note(one)
        return frames

    def _parse(self) -> Iterator[Frame]:
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + size:
                return
            kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
            yield Frame(kind, flags, stream, bytes(self._received[9 : 9 + size]))
            del self._received[: 9 + size]

    def _note(self, one: Frame) -> None:
        if one.kind == SETTINGS and not one.flags & ACK:
            for at in range(0, len(one.payload), 6):
                key, value = struct.unpack(">HI", one.payload[at : at + 6])
                if key == INITIAL_WINDOW_SIZE:
                    for stream in self._windows:
                        self._windows[stream] += value - self._initial
                    self._initial = value
            self.send(frame(SETTINGS, ACK, 0))
        elif one.kind == PING and not one.flags & ACK:
            self.send(frame(PING, ACK, 0, one.payload))
        elif one.kind == WINDOW_UPDATE:
            size = int.from_bytes(one.payload, "big")
            if one.stream:
                self._windows[one.stream] = self._windows.get(one.stream, 0) + size
            else:
                self._window += size
        if one.kind == HEADERS:
            self.said[one.stream] = one.payload
        if one.kind == RST_STREAM or (one.kind in {HEADERS, DATA} and one.flags & END_STREAM):
            self.ended.add(one.stream)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
