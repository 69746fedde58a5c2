"""The transport that a protocol over TLS writes to. It encrypts only what the socket has room for.

protocol ─> write ─> plaintext that waits ─> SSLObject ─> TCP transport

The size of its write buffer includes plaintext that waits, so limits on unread replies hold as over plain TCP. OpenSSL
encrypts in memory: without pieces, a large reply would exist three times.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: bytes that are encrypted at once, before the socket is asked whether it has room for more
PIECE_BYTES = 128 * 1024


class TlsTransport(asyncio.Transport):
    """The transport of one connection whose handshake is complete.

    Args:
        tcp: The transport below.
        tls: The TLS state of the connection.
        outgoing: The records that `tls` writes.
        protocol: The protocol above.
        resumed: Called when the protocol resumes reading: passes on received bytes that wait, then reads TCP again.
    """

    def __init__(
        self,
        tcp: asyncio.Transport,
        tls: ssl.SSLObject,
        outgoing: ssl.MemoryBIO,
        protocol: asyncio.Protocol,
        resumed: Callable[[], None],
    ) -> None:
        super().__init__()
        self.protocol = protocol
        self.reading = True
        self.full = False  # the TCP transport has no room; nothing waits unless it is full
        self._tcp = tcp
        self._tls = tls
        self._outgoing = outgoing
        self._resumed = resumed
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._paused = False  # the protocol was told to pause
        self._closing = False
        self._ending = False  # nothing more is sent after what waits
        self._ended = False  # close_notify was sent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "ssl_object":
                return self._tls
            case "sslcontext":
                return self._tls.context
            case "peercert":
                return self._tls.getpeercert()
            case _:
                return self._tcp.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def is_closing(self) -> bool:
        return self._closing or self._tcp.is_closing()

    def is_reading(self) -> bool:
        return self.reading and not self.is_closing()

    def pause_reading(self) -> None:
        if self.reading and not self.is_closing():
            self.reading = False
            self._tcp.pause_reading()

    def resume_reading(self) -> None:
        if not self.reading and not self.is_closing():
            self.reading = True
            self._resumed()

    def get_write_buffer_size(self) -> int:
        return self._waiting_bytes + self._tcp.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ending or not data or self._tcp.is_closing():
            return
        if len(data) <= PIECE_BYTES and not self.full:
            self._encrypt(data)
        else:
            self._waiting.append(memoryview(data).cast("B"))
            self._waiting_bytes += len(data)
            self._send_waiting()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """End the output with close_notify and the end of the stream; input is still received."""
        self._ending = True
        self._end_if_sent()

    def close(self) -> None:
        """Receive nothing more, and close the connection when what waits was sent."""
        if not self.is_closing():
            self.pause_reading()
            self._closing = self._ending = True
            self._end_if_sent()

    def abort(self) -> None:
        self._closing = self._ending = True
        self._drop_waiting()
        self._tcp.abort()

    def lost(self) -> None:
        """Drop what waits: the connection is lost."""
        self._closing = self._ending = self._ended = True
        self._drop_waiting()

    def tcp_full(self) -> None:
        """Tell the protocol to pause: the TCP transport has no room."""
        self.full = True
        if not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def tcp_has_room(self) -> None:
        """Send what waits; if all of it was sent, tell the protocol to resume."""
        self.full = False
        self._send_waiting()
        if self._paused and not self.full:
            self._paused = False
            self.protocol.resume_writing()

    def flush(self) -> bool:
        """Send records that the TLS state wrote by itself: alerts, session tickets, answers to a change of keys.

        Return whether there were any.
        """
        records = self._outgoing.read()
        if not records or self._ended or self._tcp.is_closing():
            return False
        self._tcp.write(records)
        return True

    def fail(self) -> None:
        """End the connection after an error in what the client sent, of which an alert tells it.

        A connection whose output has ended stays, to discard input.
        """
        if not self._ended:
            self.flush()
            self.lost()
            self._tcp.close()

    def _send_waiting(self) -> None:
        while self._waiting and not self.full and not self._tcp.is_closing():
            first = self._waiting[0]
            piece = first[:PIECE_BYTES]
            if len(piece) == len(first):
                self._waiting.popleft()
            else:
                self._waiting[0] = first[PIECE_BYTES:]
            self._waiting_bytes -= len(piece)
            self._encrypt(piece)
        self._end_if_sent()

    def _encrypt(self, data: bytes | bytearray | memoryview) -> None:
        try:
            sent = self._tls.write(data)
            while sent < len(data):
                sent += self._tls.write(memoryview(data)[sent:])
        except ssl.SSLError:  # the client has ended the connection with an alert
            self.abort()
        else:
            self._tcp.write(self._outgoing.read())

    def _end_if_sent(self) -> None:
        if self._waiting or not self._ending:
            return
        if not self._ended:
            with suppress(ssl.SSLError):  # it would also read the client's close_notify, which has not come
                self._tls.unwrap()
            self.flush()
            self._ended = True
            if not self._closing and not self._tcp.is_closing():
                self._tcp.write_eof()
        if self._closing:
            self._tcp.close()

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
