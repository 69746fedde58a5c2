"""Watches whether a client reads what was written to it, and ends the connection of one that does not."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

READ_BYTES_MIN = 64 * 1024
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger: on, for no seconds


class WriteStallGuard:
    """Who reads less than READ_BYTES_MIN in `seconds` while a reply waits is let go. All calls in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, seconds: float) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._handle: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        return self._handle is not None

    def begin(self) -> None:
        """There is no room for more: the client has to read."""
        if self._handle is None:
            self._wait()

    def end(self) -> None:
        """There is room again, or nobody to read."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wait(self) -> None:
        unread = self._transport.get_write_buffer_size()
        self._handle = self._loop.call_later(self._seconds, self._look, unread)

    def _reset(self) -> None:
        """End the connection for both sides: closed in peace, the system would keep what is unread for minutes."""
        connection = self._transport.get_extra_info("socket")
        with suppress(OSError):  # a unix socket has no such peace
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._transport.abort()

    def _look(self, unread: int) -> None:
        self._handle = None
        if self._transport.get_write_buffer_size() > unread - READ_BYTES_MIN:
            self._reset()
        else:
            self._wait()
