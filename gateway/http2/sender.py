"""The sending half of a connection: within the windows of the client and the room in the transport.

respond, headers, data, trailers ─> window and room? ──yes──> output
                                          └──no──> queue of the stream ─> flush, a frame of each stream in turn

Source: RFC 9113, sections 6.9 (flow control) and 8.1 (a reply that ends before its request).
"""

from __future__ import annotations

from millstream.gateway.http2 import frames, limits
from millstream.gateway.http2.events import ConnectionFault, ErrorCode, StreamFault, StreamSent
from millstream.gateway.http2.header_blocks import NO_TABLE
from millstream.gateway.http2.limits import DRAIN_PING, READ_RATE_MIN, ConnectionLimits, FrameAccount
from millstream.gateway.http2.stream import (
    WINDOW_BYTES,
    WINDOW_BYTES_MAX,
    ClosedStreams,
    Piece,
    ReceiveWindow,
    Stream,
)

#: output that waits to be written; beyond, data stays in the queues of the streams, and other streams get their turn
OUTPUT_BYTES_MAX = 64 * 1024
#: data of a frame, also where the client accepts more: other streams get their turn
DATA_BYTES_MAX = 32 * 1024
#: seconds between the two steps of a drain, if the client does not acknowledge the PING that separates them
DRAIN_STEP_S = 1.0


class Sender:
    """What the caller does with a connection, and what follows from it for the client.

    Args:
        limits: the limits of the connection.
        now: the current instant, in seconds.
    """

    def __init__(self, limits: ConnectionLimits, now: float) -> None:
        self.streams: dict[int, Stream] = {}
        self.closed = False  # the connection has ended
        self._limits = limits
        self._now = now
        self._closed = ClosedStreams()
        self._account = FrameAccount(limits, now)
        self._receive_window = ReceiveWindow(limits.connection_window_bytes)
        self._output: list[Piece] = []
        self._output_bytes = 0
        self._paused = False  # the transport has no room
        self._initial_window = WINDOW_BYTES
        self._send_window = WINDOW_BYTES
        self._frame_bytes_max = frames.FRAME_BYTES_MAX
        self._table = NO_TABLE
        self._waiting: dict[int, Stream] = {}  # streams with a queue, the next one first
        self._blocked: dict[int, Stream] = {}  # streams with a queue whose own window is closed
        self._emptied: list[StreamSent] = []
        self._data_bytes = 0  # sent
        self._progress: tuple[int, float] | None = None  # of `_data_bytes`, by READ_RATE_MIN, and its instant
        self._final: int | None = None  # the last stream that is served, after the second step of a drain
        self._drain_step_by: float | None = None

    def take_output(self) -> list[Piece]:
        """Return what is to be written now. Call it until it is empty: it is bounded unless frames cannot wait."""
        if self._waiting:
            self._flush()
        output, self._output = self._output, []
        self._output_bytes = 0
        return output

    def take_sent(self) -> list[StreamSent]:
        """Return the streams whose queue became empty since the last call."""
        sent, self._emptied = self._emptied, []
        return sent

    def pause(self) -> None:
        """Put no data into the output: the transport has no room."""
        self._paused = True

    def resume(self) -> None:
        """End `pause`."""
        self._paused = False

    def respond(self, number: int, head: bytes, prefix: bytes, body: bytes, trailers: bytes) -> bool:
        """Send a whole reply. Returns whether it is in the output; else StreamSent or StreamReset follows."""
        stream = self.streams.get(number)
        if stream is None:
            return True
        size = len(prefix) + len(body)
        if size > min(self._frame_bytes_max, self._send_window, stream.send_window) or self._paused or self._waiting:
            self.headers(number, head)
            self.queue(number, prefix, body, trailers=trailers)
            return False
        if self._table:
            head, self._table = self._table + head, b""
        self._output += (
            frames.head(len(head), frames.HEADERS, frames.END_HEADERS, number),
            head,
            frames.head(size, frames.DATA, 0, number),
            prefix,
            body,
            frames.head(len(trailers), frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number),
            trailers,
        )
        self._count_data(stream, size)
        self._end(stream)
        return True

    def headers(self, number: int, block: bytes, *, end: bool = False) -> None:
        """Send a header block of at most FRAME_BYTES_MAX. `end`: the reply ends with it."""
        stream = self.streams.get(number)
        if stream is None:
            return
        if self._table:
            block, self._table = self._table + block, b""
        if len(block) > frames.FRAME_BYTES_MAX:
            raise ValueError(f"a header block of {len(block)} bytes")
        flags = frames.END_HEADERS | (frames.END_STREAM if end else 0)
        self._output += (frames.head(len(block), frames.HEADERS, flags, number), block)
        if end:
            self._end(stream)

    def queue(self, number: int, *pieces: Piece, trailers: bytes | None = None) -> None:
        """Send data, and end the reply with `trailers` unless they are None. StreamSent or StreamReset follows."""
        stream = self.streams.get(number)
        if stream is None:
            return
        size = sum([len(piece) for piece in pieces])
        if not stream.queued_bytes:
            stream.queued_at = self._now
            stream.whole_by = self._now + self._limits.stall_s_max + size / READ_RATE_MIN
        stream.queue += [memoryview(piece) for piece in pieces if piece]
        stream.queued_bytes += size
        if trailers is not None:
            stream.trailers = trailers
        if not stream.queued_bytes:
            self._sent(stream)
        elif number not in self._blocked:
            self._waiting[number] = stream

    def reset(self, number: int, code: ErrorCode) -> None:
        """End a stream with RST_STREAM. No StreamReset follows."""
        stream = self.streams.get(number)
        if stream is not None:
            self._drop(stream)
            if not stream.ended:
                self._closed.closed_first(number)
            self._output.append(frames.reset(number, code))

    def consume(self, number: int, size_bytes: int) -> None:
        """Let the client send as many bytes more, on the stream and on the connection."""
        stream = self.streams.get(number)
        if stream is None:
            return  # they were given back when it ended
        stream.held_bytes -= size_bytes
        self._give_back(size_bytes)
        if not stream.ended:
            increment = stream.receive_window.consume(size_bytes)
            if increment:
                self._output.append(frames.window_update(number, increment))

    def drain(self, now: float) -> None:
        """Begin to end the connection: streams that cross this step are still served. Idempotent."""
        if self._drain_step_by is None and self._final is None and not self.closed:
            self._drain_step_by = now + DRAIN_STEP_S
            self._output.append(frames.goaway(frames.STREAM_ID_MAX, ErrorCode.NO_ERROR))
            self._output.append(frames.frame(frames.PING, 0, 0, DRAIN_PING))

    def _finish_drain(self) -> None:
        self._drain_step_by = None
        self._final = self._closed.last
        self._output.append(frames.goaway(self._closed.last, ErrorCode.NO_ERROR))

    @property
    def drained(self) -> bool:
        """Whether a drain has ended: no stream is open, and none will be served."""
        return self._final is not None and not self.streams

    def _flush(self) -> None:
        """Send from the queues what windows and the transport let pass."""
        while self._waiting and self._send_window > 0 and not self._paused and self._output_bytes < OUTPUT_BYTES_MAX:
            number, stream = next(iter(self._waiting.items()))
            del self._waiting[number]
            if stream.send_window <= 0:
                self._blocked[number] = stream
                continue
            self._send_data(stream)
            if stream.queued_bytes:
                self._waiting[number] = stream  # behind the others
            else:
                self._sent(stream)

    def _sent(self, stream: Stream) -> None:
        self._emptied.append(StreamSent(stream.number, stream.trailers is not None))
        if stream.trailers is not None:
            self.headers(stream.number, stream.trailers, end=True)

    def _send_data(self, stream: Stream) -> None:
        """Send one DATA frame."""
        size = left = min(stream.queued_bytes, self._frame_bytes_max, self._send_window, stream.send_window)
        self._output.append(frames.head(size, frames.DATA, 0, stream.number))
        while left:
            piece = stream.queue.popleft()
            if len(piece) > left:
                stream.queue.appendleft(piece[left:])
                piece = piece[:left]
            left -= len(piece)
            self._output.append(piece)
        stream.queued_bytes -= size
        self._count_data(stream, size)

    def _count_data(self, stream: Stream, size: int) -> None:
        """Account for a DATA frame that is in the output."""
        stream.send_window -= size
        self._send_window -= size
        self._output_bytes += size
        self._data_bytes += size
        self._account.earn(limits.DATA_SENT + size // limits.EARNING_BYTES)

    def _end(self, stream: Stream) -> None:
        self._account.earn(limits.ANSWERED)
        if not stream.ended:
            self._output.append(frames.reset(stream.number, ErrorCode.NO_ERROR))  # the rest is not wanted
            self._closed.closed_first(stream.number)
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        """Forget a stream and its queue."""
        number = stream.number
        self.streams.pop(number, None)
        self._waiting.pop(number, None)
        self._blocked.pop(number, None)
        stream.queue.clear()
        stream.queued_bytes = 0
        self._give_back(stream.held_bytes)

    def _give_back(self, size_bytes: int) -> None:
        increment = self._receive_window.consume(size_bytes) if size_bytes else 0
        if increment:
            self._output.append(frames.window_update(0, increment))

    def _widen(self, increment: int) -> None:
        """Widen the window of the connection. Raises ConnectionFault."""
        self._send_window += increment
        if self._send_window > WINDOW_BYTES_MAX:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is too large")

    def _widen_stream(self, stream: Stream, increment: int) -> None:
        """Widen the window of a stream. Raises StreamFault."""
        stream.send_window += increment
        if stream.send_window > WINDOW_BYTES_MAX:
            raise StreamFault(stream.number, ErrorCode.FLOW_CONTROL_ERROR)
        if stream.send_window > 0 and self._blocked.pop(stream.number, None) is not None:
            self._waiting[stream.number] = stream

    def set_initial_window(self, size_bytes: int) -> None:
        """Change the windows of all streams, as RFC 9113 section 6.9.2 says. Raises ConnectionFault."""
        change, self._initial_window = size_bytes - self._initial_window, size_bytes
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > WINDOW_BYTES_MAX:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream is too large")
        self._waiting |= self._blocked
        self._blocked = {}

    def _stalled(self) -> list[Stream]:
        """Return the streams whose client has not taken its reply in time, or takes nearly nothing of any reply."""
        waiting = [*self._waiting.values(), *self._blocked.values()]
        if not waiting:
            self._progress = None
            return []
        if self._progress is None or self._data_bytes >= self._progress[0] + READ_RATE_MIN:
            self._progress = self._data_bytes, self._now
        began = self._now - self._limits.stall_s_max
        stuck = self._progress[1] <= began
        return [stream for stream in waiting if stream.whole_by <= self._now or (stuck and stream.queued_at <= began)]
