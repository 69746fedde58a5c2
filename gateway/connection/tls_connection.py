"""TLS below our own protocol classes, which see a transport like that of plain TCP.

TCP bytes ─> handshake ─> FastPathProtocol.connection_made(TlsTransport) ─> decrypted bytes ─> data_received

| state       | left when                                      | for        |
|-------------|------------------------------------------------|------------|
| new         | the first byte is that of a TLS handshake      | handshake  |
|             | the first byte is any other                    | refused    |
|             | HANDSHAKE_S_MAX pass                           | (reset)    |
| handshake   | it is complete                                 | open       |
|             | it fails: the client is told by an alert       | refused    |
|             | HANDSHAKE_S_MAX pass since the connection began| (reset)    |
| refused     | the client closes, or HANDSHAKE_S_MAX pass     | (closed)   |
| open        | either side ends it                            | (closed)   |

asyncio's and uvloop's own TLS is not used: it has no bound on handshakes, sends no alert when a handshake fails,
resets clients of plain HTTP without an answer, and buffers replies where `reply_budget` does not count them.
OpenSSL writes records by itself, too: a client that requests new keys gets an answer each time. While the socket has no
room for these, nothing more is read.
Sources: RFC 8446 5.1 (records), 6 (alerts).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from millstream.gateway.connection.foreign_protocol import (
    PLAIN_HTTP,
    ForeignLog,
    ForeignProtocol,
    looks_like_http,
    plain_refusal,
)
from millstream.gateway.connection.tls_transport import TlsTransport

#: connections of one gateway whose handshake is not complete; each has a file descriptor and, once its client has sent
#: something, some 60 KiB. Beyond, the oldest is reset.
HANDSHAKES_MAX = 1024
#: seconds for a handshake, from the connection's beginning; then it is reset
HANDSHAKE_S_MAX = 10.0


class Handshakes:
    """The handshakes of one gateway that are not complete. Use it in the event loop's thread.

    Beyond the limit the oldest goes: a client that means it completes its handshake in two round trips, and one that
    opens connections and sends nothing has the oldest ones.

    Args:
        count_max: Limit on handshakes at one time.
    """

    def __init__(self, count_max: int = HANDSHAKES_MAX) -> None:
        self._count_max = count_max
        self._open: dict[TlsConnection, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: TlsConnection) -> None:
        """Count a new connection, and reset the oldest one if there are too many."""
        if len(self._open) >= self._count_max:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.abort()
        self._open[connection] = None

    def leave(self, connection: TlsConnection) -> None:
        """Stop counting a connection: its handshake is complete, or it is lost. Idempotent."""
        self._open.pop(connection, None)

    def abort(self) -> None:
        """Reset all connections that are counted: the gateway shuts down."""
        for connection in list(self._open):
            self.leave(connection)
            connection.abort()


_HEADER_BYTES = 5  # type, version (2), length (2)
_MAJOR_VERSION = 3
#: of a record, header included: RFC 5246 6.2.3; with TLS 1.3 it is less
_RECORD_BYTES_MAX = _HEADER_BYTES + 16 * 1024 + 2048


class ReceivedRecords:
    """Records of one connection, which wait until OpenSSL may read them.

    OpenSSL handles all records that carry no data in one call, until one with data comes. A read of 256 KiB may contain
    9,700 changes of keys, which take some 0.1 s: no other connection is served meanwhile. So it gets one at a time.
    Sources: RFC 8446 5.1 and RFC 5246 6.2.1 (the header of a record).

    Args:
        incoming: What OpenSSL reads.
    """

    __slots__ = ("_at", "_incoming", "_missing_bytes", "_waiting")

    def __init__(self, incoming: ssl.MemoryBIO) -> None:
        self._incoming = incoming
        self._waiting = b""
        self._at = 0  # of the first byte of `_waiting` that `incoming` lacks
        self._missing_bytes = 0  # of the record that has partly gone to `incoming`; 0: a header is next

    def add(self, data: bytes) -> None:
        """Take received bytes."""
        self._waiting = self._waiting[self._at :] + data
        self._at = 0

    def pass_on(self) -> bool:
        """Give OpenSSL the next bytes, up to the end of a record. Return whether that record is complete.

        What is no record goes as a whole and counts as complete, for OpenSSL to refuse.
        """
        waiting, at = self._waiting, self._at
        left_bytes = len(waiting) - at
        if not self._missing_bytes:
            if left_bytes < _HEADER_BYTES:
                return False
            record_bytes = _HEADER_BYTES + int.from_bytes(waiting[at + 3 : at + 5], "big")
            if waiting[at + 1] != _MAJOR_VERSION or record_bytes > _RECORD_BYTES_MAX:
                record_bytes = left_bytes
            self._missing_bytes = record_bytes
        part_bytes = min(self._missing_bytes, left_bytes)
        self._incoming.write(memoryview(waiting)[at : at + part_bytes])
        self._at = at + part_bytes
        self._missing_bytes -= part_bytes
        if part_bytes == left_bytes:
            self._waiting, self._at = b"", 0
        return not self._missing_bytes


#: bytes that are decrypted at once; a record has at most 16 KiB
READ_BYTES = 16 * 1024
#: records that are decrypted in one turn of the event loop, with data or without: a read of 256 KiB may contain 11,000
#: of one byte each. Those beyond wait, and other connections get their turn.
RECORDS_PER_TURN_MAX = 64
_HANDSHAKE = 0x16  # type of the record that a client begins with


@dataclass(frozen=True, slots=True)
class TlsListener:
    """What the TLS connections of a gateway share.

    Args:
        context: Returns the SSLContext for a new connection.
        handshakes: Bounds connections whose handshake is not complete.
        foreign_log: Logs clients that begin without TLS.
        handshake_s_max: Seconds for a handshake.
        plain: What clients that begin without TLS are told.
    """

    context: Callable[[], ssl.SSLContext]
    handshakes: Handshakes
    foreign_log: ForeignLog
    handshake_s_max: float = HANDSHAKE_S_MAX
    plain: ForeignProtocol = PLAIN_HTTP


class TlsConnection(asyncio.Protocol):
    """One TCP connection, which carries TLS.

    uvicorn creates protocols from a class alone, so `tls_protocol(...)` makes the class for a server.

    Args:
        arguments: Those of `protocol`, which is made when the handshake is complete.
    """

    listener: ClassVar[TlsListener]
    protocol: ClassVar[type[asyncio.Protocol]]

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._loop = asyncio.get_running_loop()
        self._tcp: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLObject | None = None  # made when the first byte comes: it takes memory
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._records = ReceivedRecords(self._incoming)  # of a connection whose handshake is complete
        self._answers_wait = False  # OpenSSL has answered while the socket had no room: nothing is read
        self._pump_due = False  # in the next turn of the loop
        self._discarding = False  # input is dropped, also what is encrypted
        self._above: TlsTransport | None = None  # of the protocol above, once the handshake is complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._tcp = transport
        self._timer = self._loop.call_later(self.listener.handshake_s_max, self.abort)
        self.listener.handshakes.enter(self)

    def abort(self) -> None:
        """Reset the connection."""
        if self._tcp is not None:
            self._tcp.abort()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        if self._above is not None:
            self._records.add(data)
            self._pump()
        elif self._tls is None and data[0] != _HANDSHAKE:
            self._refuse_plain(data)
        else:
            self._incoming.write(data)
            self._shake_hands()

    def _shake_hands(self) -> None:
        assert self._tcp is not None
        if self._tls is None:
            self._tls = self.listener.context().wrap_bio(self._incoming, self._outgoing, server_side=True)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._tcp.write(self._outgoing.read())
        except ssl.SSLError:
            self._refuse(self._outgoing.read())  # an alert that says why
        else:
            self._open(self._tcp, self._tls)

    def _open(self, tcp: asyncio.Transport, tls: ssl.SSLObject) -> None:
        self._end_handshake()
        protocol = self.protocol(**self._arguments)
        above = self._above = TlsTransport(tcp, tls, self._outgoing, protocol, self._pump_soon)
        above.flush()
        protocol.connection_made(above)
        # The client may have sent its request with the last message of its handshake.
        self._records.add(self._incoming.read())
        self._pump()

    def _end_handshake(self) -> None:
        self.listener.handshakes.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_plain(self, data: bytes) -> None:
        assert self._tcp is not None
        if looks_like_http(data):
            client = self._tcp.get_extra_info("peername")
            self.listener.foreign_log.count(self.listener.plain, client[0] if client else "a unix socket")
            self._refuse(plain_refusal(self.listener.plain))
        else:
            self.abort()

    def _refuse(self, last: bytes) -> None:
        """Send `last` and end the output; discard input until the client closes, so that it can read this."""
        assert self._tcp is not None
        self._discarding = True
        if not self._tcp.is_closing():
            self._tcp.write(last)
            self._tcp.write_eof()

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Pass received bytes on to the protocol above, as long as it reads. TCP is read when none are left."""
        self._pump_due = False
        above, tls, tcp = self._above, self._tls, self._tcp
        if above is None or tls is None or tcp is None or self._answers_wait:
            return  # the connection is lost, or its client has to read first
        for _ in range(RECORDS_PER_TURN_MAX):
            if not above.is_reading():
                break
            if not self._records.pass_on():
                tcp.resume_reading()
                break
            try:
                data = tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                continue  # a record without data
            except ssl.SSLError:
                self._fail(above, tcp)
                return
            if not data:  # close_notify
                above.close()
                return
            above.protocol.data_received(data)
        else:
            if above.is_reading():
                tcp.pause_reading()
                self._pump_soon()
        self._send_answers(above, tcp)

    def _fail(self, above: TlsTransport, tcp: asyncio.Transport) -> None:
        self._discarding = True
        above.fail()
        if not tcp.is_closing():
            tcp.resume_reading()  # its end is seen only while it is read

    def _send_answers(self, above: TlsTransport, tcp: asyncio.Transport) -> None:
        """Send what OpenSSL wrote by itself. While the socket has no room for it, read nothing more."""
        if above.flush() and above.full and above.is_reading():
            self._answers_wait = True
            tcp.pause_reading()

    def eof_received(self) -> bool | None:
        return None if self._above is None else self._above.protocol.eof_received()

    def pause_writing(self) -> None:
        if self._above is not None:
            self._above.tcp_full()

    def resume_writing(self) -> None:
        if self._above is not None:
            self._above.tcp_has_room()
            if self._answers_wait:
                self._answers_wait = False
                self._pump_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake()
        above, self._above, self._tls, self._tcp = self._above, None, None, None
        if above is not None:
            above.lost()
            above.protocol.connection_lost(exc)


def tls_protocol(protocol: type[asyncio.Protocol], listener: TlsListener) -> type[TlsConnection]:
    """Return the protocol class of a server whose connections are those of `protocol`, over TLS."""
    return type("TlsConnection", (TlsConnection,), {"protocol": protocol, "listener": listener})
