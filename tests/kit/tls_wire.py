"""A client on a bare socket that speaks TLS, and servers whose connections speak it: tests of HTTP run over both.

@pytest.fixture(scope="module", autouse=True, params=["plain", "tls"])
def transport(request): with transport_of(request.param): yield
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from millstream.gateway.connection.foreign_protocol import ForeignLog
from millstream.gateway.connection.tls_connection import Handshakes, TlsListener, tls_protocol
from millstream.services.tls.files import TlsFiles
from millstream.services.tls.identity import load_identity
from tests.kit import wire
from tests.kit.tls import CERTIFICATES
from tests.kit.wire import PATIENCE_S, Wire

FILES = TlsFiles(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")


class TlsWire(Wire):
    """A client with one socket, over TLS."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = client_context().wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    async def begin(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            else:
                await self._flush()
                return

    async def send(self, *segments: bytes) -> None:
        """Send each segment in records of its own."""
        for segment in segments:
            self.tls.write(segment)
            await self._flush()

    async def _more(self) -> None:
        while True:
            try:
                received = self.tls.read(65536)
            except ssl.SSLWantReadError:
                await self._receive()
                continue
            if not received:
                raise EOFError
            self._read += received
            return

    async def _receive(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            records = await self._loop.sock_recv(self._sock, 65536)
        if not records:
            raise EOFError
        self._incoming.write(records)

    async def _flush(self) -> None:
        if records := self._outgoing.read():
            async with asyncio.timeout(PATIENCE_S):
                await self._loop.sock_sendall(self._sock, records)

    def half_close(self) -> None:
        with suppress(ssl.SSLError):  # the server's close_notify has not come
            self.tls.unwrap()
        with suppress(BlockingIOError):
            self._sock.send(self._outgoing.read())
        super().half_close()


def client_context() -> ssl.SSLContext:
    """Return the context of a client that trusts the certificates of these tests."""
    return ssl.create_default_context(cafile=CERTIFICATES / "ca.pem")


def over_tls(protocol: type[asyncio.Protocol], **options: Any) -> type[asyncio.Protocol]:
    """Return the class of connections of `protocol` over TLS. `options`: of the TlsListener."""
    identity = load_identity(FILES)
    listener = TlsListener(
        **{
            "context": lambda: identity.context,
            "handshakes": Handshakes(),
            "foreign_log": ForeignLog(time.monotonic),
            **options,
        }
    )
    return tls_protocol(protocol, listener)


@contextmanager
def transport_of(kind: str) -> Iterator[None]:
    """Let all wires and servers in the block be `plain` or `tls`."""
    if kind == "plain":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "below", over_tls)
        patch.setattr(Wire, "connect", TlsWire.connect)
        yield
