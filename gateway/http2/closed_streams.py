"""closed_streams: what a frame of a stream means that is not open: late, or wrong.

A frame that crosses the server's RST_STREAM is late, and is dropped. On every other closed stream the client itself
said that it sends no more.
Source: RFC 9113, sections 5.1 (closed) and 5.1.1.
"""

from __future__ import annotations

from collections import deque

from millstream.gateway.http2.faults import ConnectionFault, ErrorCode

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
