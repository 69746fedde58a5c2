"""received_frames: the frames of one connection that wait to be read, cut from the received bytes a few at a time.

A read of 256 KiB may contain 28,000 frames: cutting them takes long enough for other connections to notice.
"""

from __future__ import annotations

from collections import deque

from millstream.gateway.http2.faults import ConnectionFault
from millstream.gateway.http2.frames import Frame, FrameReader

CUT_MAX = 256  # frames that are cut at once


class ReceivedFrames:
    """A queue of frames.

    Args:
        data_bytes_max: limit on the payload of DATA.
        bytes_max: limit on that of other frames.
    """

    __slots__ = ("_fault", "_frames", "_reader")

    def __init__(self, data_bytes_max: int, bytes_max: int) -> None:
        self._reader = FrameReader(data_bytes_max, bytes_max, joins=True)
        self._frames: deque[Frame] = deque()
        self._fault: ConnectionFault | None = None  # of what follows these frames

    def __bool__(self) -> bool:
        """Whether complete frames wait, or a fault behind them."""
        return bool(self._frames or self._reader.more or self._fault)

    @property
    def partial(self) -> bool:
        """Whether a frame is incomplete."""
        return self._reader.partial

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        try:
            self._reader.read(data, self._frames, CUT_MAX)
        except ConnectionFault as fault:
            self._fault = fault

    def take(self) -> Frame | None:
        """Return the next frame; None: it is not complete. Raises ConnectionFault behind the last frame before it."""
        if not self._frames:
            if self._fault is not None:
                raise self._fault
            if not self._reader.more:
                return None
            self.add(b"")
            return self.take()
        return self._frames.popleft()

    def clear(self) -> None:
        """Drop all frames."""
        self._frames.clear()
        self._reader.clear()
        self._fault = None
