"""slow_reader: reset the connection of a client that does not read its replies."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

READ_BYTES_MIN = 64 * 1024  # bytes that a client has to read in each check period
_NO_LINGER = struct.pack("ii", 1, 0)  # struct linger: on, 0 seconds


class WriteStallGuard:
    """Resets a connection whose client reads less than READ_BYTES_MIN in `seconds` while a reply waits.

    Use it in the event loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, seconds: float) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._handle: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        return self._handle is not None

    def begin(self) -> None:
        """Start the check: the transport is full, the client has to read."""
        if self._handle is None:
            self._wait()

    def end(self) -> None:
        """Stop the check: the transport has room again, or the connection is over."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wait(self) -> None:
        unread = self._transport.get_write_buffer_size()
        self._handle = self._loop.call_later(self._seconds, self._check, unread)

    def _reset(self) -> None:
        """Reset the connection. After an orderly close the kernel would keep the unread bytes for minutes."""
        connection = self._transport.get_extra_info("socket")
        with suppress(OSError):  # a unix socket has no such option
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def _check(self, unread: int) -> None:
        self._handle = None
        if self._transport.get_write_buffer_size() > unread - READ_BYTES_MIN:
            self._reset()
        else:
            self._wait()
