"""tls_connection: TLS below our own protocol classes, which see a transport like that of plain TCP.

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
from typing import Any, ClassVar

from millstream.gateway.connection.foreign_protocol import (
    PLAIN_HTTP,
    Foreign,
    ForeignLog,
    looks_like_http,
    plain_refusal,
)
from millstream.gateway.connection.tls_handshakes import HANDSHAKE_S_MAX, Handshakes
from millstream.gateway.connection.tls_records import ReceivedRecords
from millstream.gateway.connection.tls_transport import TlsTransport

#: bytes that are decrypted at once; a record has at most 16 KiB
READ_BYTES = 16 * 1024
#: records that are decrypted in one turn of the event loop, with data or without: a read of 256 KiB may contain 11,000
#: of one byte each. Those beyond wait, and other connections get their turn.
RECORDS_PER_TURN_MAX = 64
_HANDSHAKE = 0x16  # type of the record that a client begins with


class TlsListener:
    """What the TLS connections of a gateway share.

    Args:
        context: Returns the SSLContext for a new connection.
        handshakes: Bounds connections whose handshake is not complete.
        foreign_log: Logs clients that begin without TLS.
        handshake_s_max: Seconds for a handshake.
        plain: What clients that begin without TLS are told.
    """

    def __init__(
        self,
        context: Callable[[], ssl.SSLContext],
        handshakes: Handshakes,
        foreign_log: ForeignLog,
        handshake_s_max: float = HANDSHAKE_S_MAX,
        plain: Foreign = PLAIN_HTTP,
    ) -> None:
        self.context = context
        self.handshakes = handshakes
        self.foreign_log = foreign_log
        self.handshake_s_max = handshake_s_max
        self.plain = plain


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
