"""bounded_protocol: how long, and with how many bytes, a client may keep a connection and a request on it.

The fast path and the server without it have the same bounds; each decides what happens beyond them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from millstream.gateway.connection.drain import DrainingProtocol
from millstream.gateway.connection.idle_timer import LazyTimer
from millstream.gateway.connection.lingering_close import DiscardProtocol
from millstream.gateway.connection.request_head import CHUNK_LINE_BYTES, HEAD_BYTES_MAX
from millstream.gateway.connection.slow_reader import WriteStallGuard
from millstream.services.errors import Code, Failure

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
