"""A client of the pure HTTP/2 connection: it writes frames, and reads what the connection sends."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

from hpack import Decoder, Encoder

from millstream.gateway.http2 import frames
from millstream.gateway.http2.connection import Http2Connection
from millstream.gateway.http2.events import ConnectionEnded, DataReceived, ErrorCode, Event
from millstream.gateway.http2.frames import Frame, frame
from millstream.gateway.http2.header_blocks import Headers, check_request
from millstream.gateway.http2.limits import ConnectionLimits

H = TypeVar("H")
REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/service/Method"), (":authority", "test")]
GREETING = frames.PREFACE + frame(frames.SETTINGS, 0, 0)


def interpret(headers: Headers) -> Headers:
    check_request(headers)
    return headers


class PlainReader:
    """Cuts bytes into the frames that they are."""

    def __init__(self) -> None:
        self._held = b""

    def read(self, data: bytes, found: list[Frame]) -> None:
        """Append the frames that are complete with `data`."""
        data = self._held + data
        while len(data) >= frames.HEAD_BYTES:
            end = frames.HEAD_BYTES + int.from_bytes(data[:3])
            if len(data) < end:
                break
            stream = int.from_bytes(data[5:9]) & frames.STREAM_ID_MAX
            found.append((data[3], data[4], stream, data[frames.HEAD_BYTES : end]))
            data = data[end:]
        self._held = data


class Peer:
    """A connection and its client. `now` is the time of both."""

    def __init__(self, limits: ConnectionLimits | None = None, *, greet: bool = True) -> None:
        self.now = 100.0
        self.connection: Http2Connection[Headers] = Http2Connection(interpret, limits or ConnectionLimits(), self.now)
        self.encoder = Encoder()
        self.decoder = Decoder()
        self._reader = PlainReader()
        if greet:
            assert self.send(GREETING, frame(frames.SETTINGS, frames.ACK, 0)) == []
            self.sent()

    def send(self, *parts: bytes) -> list[Event[Headers]]:
        return self.connection.receive(b"".join(parts), self.now)

    def sent(self) -> list[Frame]:
        """Return the frames that the connection has sent since the last call."""
        found: list[Frame] = []
        while output := self.connection.take_output():
            self._reader.read(b"".join(output), found)
        return found

    def block(self, headers: list[Any] | None = None) -> bytes:
        return bytes(self.encoder.encode(REQUEST if headers is None else headers))

    def begin(self, stream: int, *, end: bool = False, headers: list[Any] | None = None) -> list[Event[Headers]]:
        flags = frames.END_HEADERS | (frames.END_STREAM if end else 0)
        return self.send(frame(frames.HEADERS, flags, stream, self.block(headers)))

    def data(self, stream: int, data: bytes, *, end: bool = False) -> list[Event[Headers]]:
        return self.send(frame(frames.DATA, frames.END_STREAM if end else 0, stream, data))

    def widen(self, stream: int, increment: int) -> list[Event[Headers]]:
        return self.send(frame(frames.WINDOW_UPDATE, 0, stream, struct.pack(">I", increment)))

    def set(self, key: int, value: int) -> list[Event[Headers]]:
        return self.send(frame(frames.SETTINGS, 0, 0, struct.pack(">HI", key, value)))


def ended_with(events: list[Event[Headers]]) -> ErrorCode | None:
    """Return the code with which the connection ended; None: it goes on."""
    return next((event.code for event in events if isinstance(event, ConnectionEnded)), None)


def resets(sent: list[Frame]) -> dict[int, int]:
    """Return the streams that were reset, with their codes."""
    return {number: int.from_bytes(payload) for kind, _, number, payload in sent if kind == frames.RST_STREAM}


def of_kind(sent: list[Frame], kind: int) -> list[Frame]:
    return [one for one in sent if one[0] == kind]


def joined(events: Sequence[Event[H]]) -> list[Event[H]]:
    """Return events, those of data that follows other data of its stream made one: long DATA comes in parts."""
    found: list[Event[H]] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, DataReceived) and isinstance(last, DataReceived) and event.stream == last.stream:
            found[-1] = DataReceived(event.stream, last.data + event.data, event.ended)
        else:
            found.append(event)
    return found
