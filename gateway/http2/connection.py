"""The server side of one HTTP/2 connection.

bytes ─> frames ─> receive ─> events ─> (the caller) ─> respond, queue, reset, consume ─> take_output ─> bytes

The caller passes the time in, calls `check` now and then, and writes the output once per turn of its loop. Frames that
would take long to read wait for the next turn: `receive` stops at TURN_WORK_MAX.
Source: RFC 9113.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from millstream.gateway.http2 import frames, limits
from millstream.gateway.http2.events import (
    ConnectionEnded,
    ConnectionFault,
    DataReceived,
    ErrorCode,
    Event,
    RequestStarted,
    StreamFault,
    StreamReset,
)
from millstream.gateway.http2.frames import Frame, ReceivedFrames, Setting, read_settings
from millstream.gateway.http2.header_blocks import (
    HeaderReader,
    Headers,
    UnfinishedBlock,
    check_trailers,
    content_length,
    without_blanks,
)
from millstream.gateway.http2.limits import DRAIN_PING, KEEPALIVE_PING, ConnectionClocks, ConnectionLimits
from millstream.gateway.http2.sender import DATA_BYTES_MAX, Sender
from millstream.gateway.http2.stream import WINDOW_BYTES, ReceiveWindow, Stream

H = TypeVar("H")
#: Work of one turn of the event loop, in frames. What was received beyond it waits, and other connections get their
#: turn: a read of 256 KiB may contain 28,000 frames, or header blocks that take a second to decode.
TURN_WORK_MAX = 1024
HEADERS_WORK = 8  # HEADERS begin or end a call
SETTINGS_WORK = 256  # SETTINGS may change the windows of all streams
BYTES_PER_WORK = 1024  # of a payload
DECODED_BYTES_PER_WORK = 2  # bytes of a header block that take as long to decode as a frame
#: payload of SETTINGS, 170 settings; there are some ten
SETTINGS_BYTES_MAX = 1024


class Http2Connection(Sender, Generic[H]):
    """One connection. Its output begins with our SETTINGS.

    Args:
        interpret: turns the decoded headers of a request into `RequestStarted.head`. Raises ValueError if they are
            malformed: the stream is reset with PROTOCOL_ERROR.
        limits: the limits of the connection.
        now: the current instant, in seconds.
    """

    def __init__(self, interpret: Callable[[Headers], H], limits: ConnectionLimits, now: float) -> None:
        super().__init__(limits, now)
        self._received = ReceivedFrames(limits.frame_bytes_max, limits.header_frame_bytes_max)
        self._opened = False  # the first SETTINGS arrived
        self._headers = HeaderReader(_opening(interpret), limits.header_list_bytes_max, limits.header_bomb_bytes)
        self._live = ConnectionClocks(limits, now)
        self._block: UnfinishedBlock | None = None
        self._events: list[Event[H]] = []
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: limits.streams_max,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            Setting.MAX_FRAME_SIZE: limits.frame_bytes_max,
            Setting.MAX_HEADER_LIST_SIZE: limits.header_list_bytes_max,
        }
        self._output.append(frames.settings(settings))
        if limits.connection_window_bytes > WINDOW_BYTES:
            self._output.append(frames.window_update(0, limits.connection_window_bytes - WINDOW_BYTES))

    # --- what the client sends

    def receive(self, data: bytes, now: float) -> list[Event[H]]:
        """Return what the received bytes mean, of the first TURN_WORK_MAX; `receive_rest` returns the rest.

        After ConnectionEnded further bytes are ignored.
        """
        if self.closed:
            return []
        self._received.add(data)
        return self.receive_rest(now)

    @property
    def unread(self) -> bool:
        """Whether received frames wait: call `receive_rest` in the next turn, and `receive` only after that."""
        return bool(self._received) and not self.closed

    def receive_rest(self, now: float) -> list[Event[H]]:
        """Return what frames mean that were received and have waited, of the next TURN_WORK_MAX."""
        events = self._events = []
        self._now = now
        try:
            complete = self._read_frames()
            if not self._received:
                self._live.received(now, complete=complete and self._block is None, partial=self._is_partial())
        except ConnectionFault as fault:
            self._fail(fault)
        return events

    def _read_frames(self) -> bool:
        """Take frames until TURN_WORK_MAX is reached. Returns whether there was one."""
        work = 0
        decoded_bytes = self._headers.decoded_bytes
        while work < TURN_WORK_MAX and (one := self._received.take()) is not None:
            self._on_frame(one)
            work += _WORK.get(one[0], 1) + len(one[3]) // BYTES_PER_WORK
            if self._headers.decoded_bytes != decoded_bytes:
                work += (self._headers.decoded_bytes - decoded_bytes) // DECODED_BYTES_PER_WORK
                decoded_bytes = self._headers.decoded_bytes
        return work > 0

    def _is_partial(self) -> bool:
        return self._block is not None or self._received.partial

    def _on_frame(self, one: Frame) -> None:
        kind, flags, number, payload = one
        if self._block is not None and (kind != frames.CONTINUATION or number != self._block.stream):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        if not self._opened:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._opened = True
        if kind >= len(_RECEIVERS):
            self._account.spend(limits.FRAME, "frames of unknown types", self._now)
            return
        try:
            _RECEIVERS[kind](self, flags, number, payload)
        except StreamFault as fault:
            self._reset(fault.stream, fault.code)

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        if not self._receive_window.receive(size):
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is exceeded")
        data = frames.without_padding(flags, payload)
        stream = self.streams.get(number)
        if stream is None:
            self._must_have_been_open(number)
            self._closed.check_late(number)
            self._check_not_empty(data)
            self._give_back(size)
            return
        stream.held_bytes += size
        if stream.ended:
            raise StreamFault(number, ErrorCode.STREAM_CLOSED)
        if not stream.receive_window.receive(size):
            raise StreamFault(number, ErrorCode.FLOW_CONTROL_ERROR)
        stream.ended = ended = bool(flags & frames.END_STREAM)
        if not ended:
            self._check_not_empty(data)
        if len(data) < size:
            self.consume(number, size - len(data))
        if stream.announced_bytes is not None:
            stream.announced_bytes -= len(data)
            stream.check_length()
        self._events.append(DataReceived(number, data, ended))

    def _check_not_empty(self, data: bytes) -> None:
        if not data:
            self._account.spend(limits.EMPTY_DATA, "empty frames", self._now)

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS of stream 0")
        block = frames.header_block(flags, payload)
        ended = bool(flags & frames.END_STREAM)
        self._check_block(len(block))
        if flags & frames.END_HEADERS:
            self._on_header_block(number, block, ended=ended)
        else:
            self._block = UnfinishedBlock(number, block, ended=ended)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._account.spend(limits.FRAME, "CONTINUATION frames", self._now)
        block.fragments.append(payload)
        block.size += len(payload)
        self._check_block(block.size)
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_header_block(number, b"".join(block.fragments), ended=block.ended)

    def _check_block(self, size_bytes: int) -> None:
        if size_bytes > self._limits.header_block_bytes_max:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the header block is too long")

    def _on_header_block(self, number: int, block: bytes, *, ended: bool) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            self._on_trailers(stream, block, ended=ended)
        elif not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client opens streams with odd numbers")
        elif number <= self._closed.last:
            self._headers.fields(block)
            self._closed.check_late(number)
            self._account.spend(limits.HEADERS, "HEADERS of ended streams", self._now)
        else:
            self._open(number, block, ended=ended)

    def _open(self, number: int, block: bytes, *, ended: bool) -> None:
        self._closed.open(number)
        try:
            opening = self._headers.read(block)
            head, announced_bytes = (None, None) if opening is None else opening
            if ended and announced_bytes:
                raise ValueError("the request has no content, and a content-length")
        except ValueError:
            self._account.spend(limits.HEADERS, "malformed requests", self._now)
            raise StreamFault(number, ErrorCode.PROTOCOL_ERROR) from None
        if self._final is not None or len(self.streams) >= self._limits.streams_max:
            self._account.spend(limits.HEADERS, "streams at once", self._now)
            raise StreamFault(number, ErrorCode.REFUSED_STREAM)
        self._account.earn(limits.OPENED)
        window = ReceiveWindow(self._limits.stream_window_bytes)
        sends = self._initial_window
        self.streams[number] = Stream(number, sends, window, announced_bytes, self._now, ended=ended)
        self._events.append(RequestStarted(number, head, ended))

    def _on_trailers(self, stream: Stream, block: bytes, *, ended: bool) -> None:
        fields = self._headers.fields(block)
        if stream.ended:
            raise StreamFault(stream.number, ErrorCode.STREAM_CLOSED)
        if not ended:
            raise StreamFault(stream.number, ErrorCode.PROTOCOL_ERROR)
        try:
            check_trailers(without_blanks(fields))
        except ValueError:
            raise StreamFault(stream.number, ErrorCode.PROTOCOL_ERROR) from None
        stream.ended = True
        stream.check_length()
        self._events.append(DataReceived(stream.number, b"", ended))

    def _on_priority(self, _: int, number: int, payload: bytes) -> None:
        if not number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY of stream 0")
        self._account.spend(limits.FRAME, "PRIORITY frames", self._now)
        if len(payload) != frames.PRIORITY_BYTES:
            raise StreamFault(number, ErrorCode.FRAME_SIZE_ERROR)

    def _on_reset(self, _: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has 4 bytes")
        if not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM of a stream that no client opens")
        stream = self.streams.get(number)
        if stream is None:
            # It crossed the end of the stream. Or the stream is idle, for which RFC 9113, section 6.4 would end the
            # connection: grpc-core (C++ 1.51) resets calls of which it has sent nothing, and goes on with the others.
            self._account.spend(limits.FRAME, "resets of streams that are not open", self._now)
            return
        self._account.spend_reset(stream.opened_at, self._now)
        self._drop(stream)
        self._events.append(StreamReset(number, int.from_bytes(payload)))

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement has a payload")
            self._live.settings_acknowledged = True
            return
        self._account.spend(limits.SETTINGS, "SETTINGS frames", self._now)
        if len(payload) > SETTINGS_BYTES_MAX:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many settings in a frame")
        # Of a setting that is repeated, only the last value counts: each change of the window walks all streams.
        for key, value in read_settings(payload).items():
            if key == Setting.INITIAL_WINDOW_SIZE:
                self.set_initial_window(value)
            elif key == Setting.MAX_FRAME_SIZE:
                self._frame_bytes_max = min(value, DATA_BYTES_MAX)
        self._output.append(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _on_push_promise(self, _: int, __: int, ___: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client sends no PUSH_PROMISE")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING has 8 bytes")
        if not flags & frames.ACK:
            self._account.spend(limits.PING, "PING frames", self._now)
            self._output.append(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == DRAIN_PING and self._drain_step_by is not None:
            self._finish_drain()

    def _on_goaway(self, _: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has at least 8 bytes")
        self._account.spend(limits.FRAME, "GOAWAY frames", self._now)

    def _on_window_update(self, _: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
        self._account.spend(limits.FRAME, "WINDOW_UPDATE frames", self._now)
        increment = int.from_bytes(payload) & frames.STREAM_ID_MAX
        if not number:
            if not increment:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self._widen(increment)
            return
        self._must_have_been_open(number)
        stream = self.streams.get(number)
        if stream is None:
            return  # it crossed the end of the stream
        if not increment:
            raise StreamFault(number, ErrorCode.PROTOCOL_ERROR)
        self._widen_stream(stream, increment)

    def _must_have_been_open(self, number: int) -> None:
        if not number & 1 or number > self._closed.last:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame of a stream that is idle")

    # --- time and the end

    def check(self, now: float) -> list[Event[H]]:
        """Return what the passing of time means: stalled streams are reset, a dead client's connection ends."""
        if self.closed:
            return []
        events = self._events = []
        self._now = now
        try:
            if self._live.check(now, begun=not self._received.preface, partial=self._is_partial()):
                self._output.append(frames.frame(frames.PING, 0, 0, KEEPALIVE_PING))
            if self._drain_step_by is not None and now >= self._drain_step_by:
                self._finish_drain()
            for stream in self._stalled():
                self._reset(stream.number, ErrorCode.ENHANCE_YOUR_CALM)
        except ConnectionFault as fault:
            self._fail(fault)
        return events

    def _reset(self, number: int, code: ErrorCode) -> None:
        """End a stream for a fault of its client: it costs what a reset by the client costs, however long it lived."""
        stream = self.streams.get(number)
        if stream is not None:
            self._account.spend(limits.RESET, "faults of streams", self._now)
            self._drop(stream)
            self._events.append(StreamReset(number, code))
        if number <= self._closed.last:  # also of a request that had ended: the rest of a long frame may follow
            self._closed.closed_first(number)
        self._output.append(frames.reset(number, code))

    def abandon(self) -> None:
        """Drop all streams: the transport is gone."""
        self.closed = True
        self._received.clear()
        for streams in (self.streams, self._waiting, self._blocked):
            streams.clear()

    def _fail(self, fault: ConnectionFault) -> None:
        self.abandon()
        self._output.append(frames.goaway(self._closed.last, fault.code, fault.message))
        self._events.append(ConnectionEnded(fault.code, fault.message))


def _opening(interpret: Callable[[Headers], H]) -> Callable[[Headers], tuple[H, int | None]]:
    """Return a function that interprets the headers of a request, and reads their content-length."""

    def read(headers: Headers) -> tuple[H, int | None]:
        headers = without_blanks(headers)
        return interpret(headers), content_length(headers)

    return read


_WORK = {frames.HEADERS: HEADERS_WORK, frames.CONTINUATION: HEADERS_WORK, frames.SETTINGS: SETTINGS_WORK}
#: by type of frame; not bound to a connection, which would then refer to itself and hold its replies until the next
#: garbage collection
_RECEIVERS: tuple[Callable[[Http2Connection[Any], int, int, bytes], None], ...] = (
    Http2Connection._on_data,
    Http2Connection._on_headers,
    Http2Connection._on_priority,
    Http2Connection._on_reset,
    Http2Connection._on_settings,
    Http2Connection._on_push_promise,
    Http2Connection._on_ping,
    Http2Connection._on_goaway,
    Http2Connection._on_window_update,
    Http2Connection._on_continuation,
)
