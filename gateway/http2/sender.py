"""What a connection sends, within the windows of the client and the room in the transport.

respond, headers, data, trailers ─> window and room? ──yes──> output
                                          └──no──> queue of the stream ─> flush, a frame of each stream in turn

Source: RFC 9113, sections 6.9 (flow control) and 8.1 (a reply that ends before its request).
"""

from __future__ import annotations

from millstream.gateway.http2 import frames, limits
from millstream.gateway.http2.events import ConnectionFault, ErrorCode, StreamFault, StreamSent
from millstream.gateway.http2.header_blocks import NO_TABLE
from millstream.gateway.http2.limits import READ_RATE_MIN, Account
from millstream.gateway.http2.stream import WINDOW_BYTES, WINDOW_BYTES_MAX, ClosedStreams, Piece, Stream

#: output that waits to be written; beyond, data stays in the queues of the streams, and other streams get their turn
OUTPUT_BYTES_MAX = 64 * 1024
#: data of a frame, also where the client accepts more: other streams get their turn
DATA_BYTES_MAX = 32 * 1024


class Sender:
    """The sending side of a connection.

    Args:
        streams: the open streams; those that end here are removed.
        closed: learns of streams whose reply ends before their request.
        earned: the account that data and ended replies add to.
        stall_s_max: seconds that a client may be late in taking a reply.
    """

    def __init__(self, streams: dict[int, Stream], closed: ClosedStreams, earned: Account, stall_s_max: float) -> None:
        self.output: list[Piece] = []
        self.paused = False  # whether the transport has no room
        self.initial_window = WINDOW_BYTES
        self._streams = streams
        self._closed = closed
        self._earned = earned
        self._stall_s_max = stall_s_max
        self._window = WINDOW_BYTES
        self._frame_bytes_max = frames.FRAME_BYTES_MAX
        self._output_bytes = 0
        self._table = NO_TABLE
        self._waiting: dict[int, Stream] = {}  # streams with a queue, the next one first
        self._blocked: dict[int, Stream] = {}  # streams with a queue whose own window is closed
        self._emptied: list[StreamSent] = []
        self._data_bytes = 0  # sent
        self._progress: tuple[int, float] | None = None  # of `_data_bytes`, by READ_RATE_MIN, and its instant

    def take_output(self) -> list[Piece]:
        """Return what is to be written now, and forget it."""
        output, self.output = self.output, []
        self._output_bytes = 0
        return output

    def control(self, frame: bytes) -> None:
        """Send a frame that no window bounds."""
        self.output.append(frame)

    def set_frame_bytes_max(self, size_bytes: int) -> None:
        """Set the limit of the client on the payload of a frame."""
        self._frame_bytes_max = min(size_bytes, DATA_BYTES_MAX)

    def respond(self, stream: Stream, head: bytes, prefix: bytes, body: bytes, trailers: bytes) -> bool:
        """Send a whole reply if nothing is in its way, and return whether it was sent."""
        size = len(prefix) + len(body)
        if size > min(self._frame_bytes_max, self._window, stream.send_window) or self.paused or self._waiting:
            return False
        number = stream.number
        if self._table:
            head, self._table = self._table + head, b""
        self.output += (
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

    def headers(self, stream: Stream, block: bytes, *, end: bool) -> None:
        """Send a header block of at most FRAME_BYTES_MAX."""
        if self._table:
            block, self._table = self._table + block, b""
        if len(block) > frames.FRAME_BYTES_MAX:
            raise ValueError(f"a header block of {len(block)} bytes")
        flags = frames.END_HEADERS | (frames.END_STREAM if end else 0)
        self.output += (frames.head(len(block), frames.HEADERS, flags, stream.number), block)
        if end:
            self._end(stream)

    def queue(self, stream: Stream, pieces: tuple[Piece, ...], trailers: bytes | None, now: float) -> None:
        """Send data, then trailers unless they are None. StreamSent tells when all is in the output."""
        size = sum([len(piece) for piece in pieces])
        if not stream.queued_bytes:
            stream.queued_at = now
            stream.whole_by = now + self._stall_s_max + size / READ_RATE_MIN
        stream.queue += [memoryview(piece) for piece in pieces if piece]
        stream.queued_bytes += size
        if trailers is not None:
            stream.trailers = trailers
        if not stream.queued_bytes:
            self._sent(stream)
        elif stream.number not in self._blocked:
            self._waiting[stream.number] = stream

    def flush(self) -> None:
        """Send from the queues what windows and the transport let pass."""
        while self._waiting and self._window > 0 and not self.paused and self._output_bytes < OUTPUT_BYTES_MAX:
            number, stream = next(iter(self._waiting.items()))
            del self._waiting[number]
            if stream.send_window <= 0:
                self._blocked[number] = stream
                continue
            self._data(stream)
            if stream.queued_bytes:
                self._waiting[number] = stream  # behind the others
            else:
                self._sent(stream)

    def take_sent(self) -> list[StreamSent]:
        """Return the streams whose queue became empty, and forget them."""
        sent, self._emptied = self._emptied, []
        return sent

    def _sent(self, stream: Stream) -> None:
        ends = stream.trailers is not None
        if stream.trailers is not None:
            self.headers(stream, stream.trailers, end=True)
        self._emptied.append(StreamSent(stream.number, ends, stream.held_bytes))

    def _data(self, stream: Stream) -> None:
        """Send one DATA frame."""
        size = left = min(stream.queued_bytes, self._frame_bytes_max, self._window, stream.send_window)
        self.output.append(frames.head(size, frames.DATA, 0, stream.number))
        while left:
            piece = stream.queue.popleft()
            if len(piece) > left:
                stream.queue.appendleft(piece[left:])
                piece = piece[:left]
            left -= len(piece)
            self.output.append(piece)
        stream.queued_bytes -= size
        self._count_data(stream, size)

    def _count_data(self, stream: Stream, size: int) -> None:
        """Account for a DATA frame that is in the output."""
        stream.send_window -= size
        self._window -= size
        self._output_bytes += size
        self._data_bytes += size
        self._earned.earn(limits.DATA_SENT + size // limits.EARNING_BYTES)

    def _end(self, stream: Stream) -> None:
        self._earned.earn(limits.ANSWERED)
        if not stream.ended:
            self.output.append(frames.reset(stream.number, ErrorCode.NO_ERROR))  # the rest of the request is not wanted
            self._closed.closed_first(stream.number)
        self.drop(stream)

    def drop(self, stream: Stream) -> None:
        """Forget a stream and its queue."""
        self._streams.pop(stream.number, None)
        self._waiting.pop(stream.number, None)
        self._blocked.pop(stream.number, None)
        stream.queue.clear()
        stream.queued_bytes = 0

    def widen(self, increment: int) -> None:
        """Widen the window of the connection. Raises ConnectionFault."""
        self._window += increment
        if self._window > WINDOW_BYTES_MAX:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is too large")

    def widen_stream(self, stream: Stream, increment: int) -> None:
        """Widen the window of a stream. Raises StreamFault."""
        stream.send_window += increment
        if stream.send_window > WINDOW_BYTES_MAX:
            raise StreamFault(stream.number, ErrorCode.FLOW_CONTROL_ERROR)
        if stream.send_window > 0 and self._blocked.pop(stream.number, None) is not None:
            self._waiting[stream.number] = stream

    def set_initial_window(self, size_bytes: int) -> None:
        """Change the windows of all streams, as RFC 9113 section 6.9.2 says. Raises ConnectionFault."""
        change, self.initial_window = size_bytes - self.initial_window, size_bytes
        for stream in self._streams.values():
            stream.send_window += change
            if stream.send_window > WINDOW_BYTES_MAX:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream is too large")
        self._waiting |= self._blocked
        self._blocked = {}

    def stalled(self, now: float) -> list[Stream]:
        """Return the streams whose client has not taken its reply in time, or takes nearly nothing of any reply."""
        waiting = [*self._waiting.values(), *self._blocked.values()]
        if not waiting:
            self._progress = None
            return []
        if self._progress is None or self._data_bytes >= self._progress[0] + READ_RATE_MIN:
            self._progress = self._data_bytes, now
        began = now - self._stall_s_max
        stuck = self._progress[1] <= began
        return [stream for stream in waiting if stream.whole_by <= now or (stuck and stream.queued_at <= began)]
