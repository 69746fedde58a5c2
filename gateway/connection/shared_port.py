"""shared_port: HTTP/1.1 and HTTP/2 on one port, told apart by the first bytes of a connection.

first bytes ─> the preface of HTTP/2 ─yes─> the connection class of gRPC takes the transport
                                      ─no──> HTTP/1.1
Over TLS the same bytes decide. ALPN has told the client before which protocol it may speak.
Source: RFC 9113, section 3.4: no request of HTTP/1.1 begins like the preface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from millstream.gateway.http2.frames import PREFACE


class _HandedOver(ConnectionError):
    """Why a connection is no longer one of HTTP/1.1. It tells uvicorn not to close the transport."""


class SharedPort(asyncio.Protocol):
    """Mixed into the protocol class of HTTP/1.1: hands connections of HTTP/2 over."""

    http2: ClassVar[Callable[[], asyncio.Protocol]]
    transport: asyncio.Transport

    _unknown: bytes | None = b""  # of a connection whose protocol is not known; None: it is HTTP/1.1

    def data_received(self, data: bytes) -> None:
        if self._unknown is not None:
            data = self._unknown + data
            if len(data) < len(PREFACE) and PREFACE.startswith(data):
                self._unknown = data  # the timer of the connection bounds how long
                return
            if data.startswith(PREFACE):
                self._hand_over(data)
                return
            self._unknown = None
        super().data_received(data)

    def _hand_over(self, data: bytes) -> None:
        transport, connection = self.transport, type(self).http2()
        super().connection_lost(_HandedOver())
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if not transport.is_closing():
            connection.data_received(data)


def shared_port_protocol(http: type[Any], http2: Callable[[], asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Return the protocol class of a port for both protocols.

    Args:
        http: the class of connections of HTTP/1.1.
        http2: makes a connection of HTTP/2.
    """
    return type("SharedPort", (SharedPort, http), {"http2": staticmethod(http2)})
