"""The state of a stream whose call has not ended, its flow control, and what frames of other streams mean.

A stream is in the connection's table while it is open or half-closed. Bytes that the server has consumed are given back
in large pieces. A frame that crosses the server's RST_STREAM is late, and is dropped; on every other closed stream the
client itself said that it sends no more.
Source: RFC 9113, sections 5.1 (states), 5.1.1, 5.2 and 6.9 (windows).
"""

from __future__ import annotations

from collections import deque

from millstream.gateway.http2.events import ConnectionFault, ErrorCode, StreamFault

WINDOW_BYTES = 65535  # every window at first (RFC 9113, section 6.9.2)
WINDOW_BYTES_MAX = (1 << 31) - 1


class ReceiveWindow:
    """How many bytes a client may still send.

    Args:
        size_bytes: the window while nothing is held.
        left_bytes: what the client may send now; None: `size_bytes`.
    """

    __slots__ = ("_consumed", "_left", "_size")

    def __init__(self, size_bytes: int, left_bytes: int | None = None) -> None:
        self._size = size_bytes
        self._left = size_bytes if left_bytes is None else left_bytes
        self._consumed = 0

    def receive(self, size_bytes: int) -> bool:
        """Count received bytes. Returns False if the client may not send as many."""
        self._left -= size_bytes
        return self._left >= 0

    def consume(self, size_bytes: int) -> int:
        """Count consumed bytes, and return the increment of a WINDOW_UPDATE; 0: none is due."""
        consumed = self._consumed = self._consumed + size_bytes
        if consumed * 2 < self._size:
            return 0
        self._consumed = 0
        self._left += consumed
        return consumed


Piece = bytes | memoryview


class Stream:
    """One stream.

    Args:
        number: the identifier.
        send_window: bytes that the client accepts; may be negative.
        receive_window: what the client may send.
        announced_bytes: data that is still to come, by the content-length; None: the client did not say.
        opened_at: the instant at which it began, in seconds.
        ended: whether the client sends no more.
    """

    __slots__ = (
        "announced_bytes",
        "ended",
        "held_bytes",
        "number",
        "opened_at",
        "queue",
        "queued_at",
        "queued_bytes",
        "receive_window",
        "send_window",
        "trailers",
        "whole_by",
    )

    def __init__(
        self,
        number: int,
        send_window: int,
        receive_window: ReceiveWindow,
        announced_bytes: int | None,
        opened_at: float,
        *,
        ended: bool,
    ) -> None:
        self.number = number
        self.send_window = send_window
        self.receive_window = receive_window
        self.announced_bytes = announced_bytes
        self.opened_at = opened_at
        self.ended = ended
        self.held_bytes = 0  # received and not consumed
        self.queue: deque[Piece] = deque()  # data that waits for a window, or for room in the transport
        self.queued_bytes = 0
        self.trailers: bytes | None = None  # sent when the queue is empty; they end the stream
        self.queued_at = 0.0  # instant at which the queue began to wait
        self.whole_by = 0.0  # instant by which the client must have taken it

    def check_length(self) -> None:
        """Check the data received against the content-length. Raises StreamFault. Source: RFC 9113, section 8.1.1."""
        left = self.announced_bytes
        if left is not None and (left < 0 or (left and self.ended)):
            raise StreamFault(self.number, ErrorCode.PROTOCOL_ERROR)


#: Streams remembered that the server closed first. Beyond, the oldest is forgotten: a frame of a stream up to its
#: number is then never a fault.
CLOSED_FIRST_MAX = 4096


class ClosedStreams:
    """The streams of one connection that are not open."""

    __slots__ = ("_closed_first", "_forgotten", "_order", "_skipped", "last")

    def __init__(self) -> None:
        self.last = 0  # the stream that the client opened last
        self._skipped = 0  # the highest number below `last` that was never opened
        self._closed_first: set[int] = set()
        self._order: deque[int] = deque()  # of `_closed_first`, the oldest first
        self._forgotten = 0  # the highest number forgotten

    def open(self, number: int) -> None:
        """Note that the client opens a stream, which closes all lower ones that it never opened."""
        if number > self.last + 2:
            self._skipped = number - 2
        self.last = number

    def closed_first(self, number: int) -> None:
        """Note that the server closed a stream whose request had not ended."""
        if number in self._closed_first:
            return
        if len(self._order) >= CLOSED_FIRST_MAX:
            oldest = self._order.popleft()
            self._closed_first.discard(oldest)
            self._forgotten = max(self._forgotten, oldest)
        self._closed_first.add(number)
        self._order.append(number)

    def check_late(self, number: int) -> None:
        """Raise ConnectionFault unless a frame of a closed stream may be one that crosses the server's RST_STREAM."""
        if number in self._closed_first or number <= self._forgotten:
            return
        if number <= self._skipped:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame of a stream that was skipped")
        raise ConnectionFault(ErrorCode.STREAM_CLOSED, "a frame of a stream that the client has ended")
