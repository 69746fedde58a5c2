"""How long, and with how many bytes, a client may keep a connection and a request on it, and how a
connection ends whose client is still sending, or does not read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from millstream.gateway.connection.drain import DrainingProtocol
from millstream.gateway.connection.request_head import CHUNK_LINE_BYTES, HEAD_BYTES_MAX
from millstream.services.errors import Code, Failure

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


class DiscardProtocol(asyncio.Protocol):
    """Takes the place of `protocol`: discards input, passes other events on. End of input closes the connection.

    A socket that is closed with unread input is reset, and the reset can overtake the last reply. So a connection that
    refuses a client which is still sending discards its input, and waits briefly for the client to close.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)


_NEVER = float("inf")


class LazyTimer:
    """Calls `on_due` when the time set last is reached. Each request moves it, which is one assignment."""

    __slots__ = ("_armed", "_due", "_handle", "_loop", "_on_due")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._on_due: Callable[[], None] | None = on_due
        self._due = _NEVER
        self._armed = _NEVER  # when the loop calls `_check`: never after `_due`, mostly long before
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Move the timer to `seconds` from now."""
        due = self._due = self._loop.time() + seconds
        if due < self._armed:
            self._arm(due)

    def unset(self) -> None:
        self._due = _NEVER

    def close(self) -> None:
        """Stop the timer and drop its references. It cannot be set again."""
        self._due = _NEVER
        self._on_due = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, due: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._armed = due
        self._handle = self._loop.call_later(max(0.0, due - self._loop.time()), self._check)

    def _check(self) -> None:
        self._handle = None
        self._armed = _NEVER
        if self._due == _NEVER or self._on_due is None:
            return
        if self._due > self._loop.time():
            self._arm(self._due)
        else:
            self._due = _NEVER
            self._on_due()


SENT_BYTES_MIN = 64 * 1024  # bytes of a body that a client has to send each second
LINGER_S = 5.0  # time for a client to close its end after the last reply, before its connection is reset or closed


class BoundedProtocol(DrainingProtocol):
    """The request that a connection receives, as far as bounds need it: its deadline and the bytes around its body."""

    client_stall_s_max: ClassVar[float]
    connections_max: ClassVar[int]

    transport: asyncio.Transport

    _receiving = False  # a request has begun to arrive and is not complete
    _head_complete = False  # … and its head has arrived
    _read_deadline = 0.0  # instant by which more of that request must arrive
    #: of that request, without its first segment: of its head, then of chunk lines and trailers beyond what data needs
    _framing_bytes = 0

    _lingering = False  # the connection has sent its last reply and waits for the client to close

    _timer: LazyTimer  # keep-alive while no request is being received, else the read timeout
    _write_stall: WriteStallGuard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = LazyTimer(self.loop, self._timed_out)
        self._write_stall = WriteStallGuard(self.loop, transport, self.client_stall_s_max)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.close()
        self._write_stall.end()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_stall.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_stall.end()

    def shutdown(self) -> None:
        """Close the connection if it is idle, else after its reply. One that ends anyway is left to its end."""
        if not self._lingering and not self._ending:
            super().shutdown()

    def _timed_out(self) -> None:
        """The timer is due. The server says what to do."""
        raise NotImplementedError

    def _arm_timer(self) -> None:
        """Set the keep-alive timeout and, while a request is being received, the read timeout.

        A partial request takes a connection, bytes of a receive budget, or an upload slot. Each byte of a body moves
        the deadline, but a client may be at most `client_stall_s_max` behind a rate of SENT_BYTES_MIN a second.
        """
        seconds: float = self.timeout_keep_alive
        if self._receiving:
            now = self.loop.time()
            self._read_deadline = min(self._read_deadline, now + self.client_stall_s_max)
            seconds = min(seconds, max(0.0, self._read_deadline - now))
        self._timer.set(seconds)

    def _begin_request(self) -> None:
        self._receiving = True
        self._head_complete = False
        self._framing_bytes = 0
        self._read_deadline = self.loop.time() + self.client_stall_s_max

    def _end_head(self) -> None:
        self._head_complete = True
        self._framing_bytes = 0

    def _count_chunk(self) -> None:
        self._framing_bytes = max(0, self._framing_bytes - CHUNK_LINE_BYTES)

    def _count_body(self, size_bytes: int) -> None:
        self._framing_bytes = max(0, self._framing_bytes - size_bytes)
        self._read_deadline += size_bytes / SENT_BYTES_MIN

    def _framing_fault(self) -> str | None:
        """Return why the request that is being received must be refused; None if it may go on."""
        if self._framing_bytes <= HEAD_BYTES_MAX:
            return None
        part = "chunk lines and trailers of the request are" if self._head_complete else "request's head is"
        return f"the {part} larger than {HEAD_BYTES_MAX} bytes"

    def _discard_input(self) -> None:
        self.transport.set_protocol(DiscardProtocol(self))
        self.flow.resume_reading()

    def _linger(self, end: Callable[[], None]) -> None:
        """Close the connection after its last reply, while the client may still be sending.

        `end` is called after LINGER_S.
        """
        self._receiving = False
        self._lingering = True
        self._discard_input()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer.unset()
        self.timeout_keep_alive_task = self.loop.call_later(LINGER_S, end)


def too_many_connections() -> Failure:
    """Return the refusal of a connection beyond the limit."""
    return Failure(Code.UNAVAILABLE, "too many connections are open; try again later", retry_after_s=1)


def too_slow() -> Failure:
    """Return the refusal of a request whose bytes came too late."""
    return Failure(
        Code.SLOW,
        f"the request came too slowly: send {SENT_BYTES_MIN >> 10} KiB a second or more (MILLSTREAM_CLIENT_STALL_S_MAX "
        "bounds how long it may be slower)",
    )
