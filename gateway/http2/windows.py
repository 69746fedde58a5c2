"""windows: flow control of what a client sends. Bytes that the server has consumed are given back in large pieces.

Source: RFC 9113, sections 5.2 and 6.9.
"""

from __future__ import annotations

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
