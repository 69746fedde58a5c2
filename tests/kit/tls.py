"""A TLS proxy in front of a server without TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from millstream.services.queue.url import RedisAddress

CERTIFICATES = Path(__file__).parents[1] / "integration" / "certificates"
AUTHORITY = f"ssl_ca_certs={CERTIFICATES / 'ca.pem'}"


@asynccontextmanager
async def tls_before(address: RedisAddress) -> AsyncIterator[int]:
    """Forward all connections on a free port of 127.0.0.1 to `address`; yields the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")

    connections: set[asyncio.Task[None]] = set()
    transports: set[asyncio.WriteTransport] = set()
    secured: set[asyncio.WriteTransport] = set()  # over one of the others each

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await writer.start_tls(context)
        secured.add(writer.transport)
        if address.path is not None:
            back_reader, back_writer = await asyncio.open_unix_connection(address.path)
        else:
            back_reader, back_writer = await asyncio.open_connection(address.host, address.port)
        transports.add(back_writer.transport)
        await asyncio.gather(pass_on(reader, back_writer), pass_on(back_reader, writer))

    # Not a coroutine: the task of a connection that comes as the test ends would be cancelled before it starts.
    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transports.add(writer.transport)
        connections.add(asyncio.create_task(serve(reader, writer)))

    # `ssl=context` is not used: it does not report when a connection whose handshake failed is closed.
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for transport in secured:
            # Not aborted: until Python 3.11.3 one that was closed twice cannot be. The transport below is.
            transport.close()
        await _end(server, connections, transports)


async def _end(
    server: asyncio.Server, connections: set[asyncio.Task[None]], transports: set[asyncio.WriteTransport]
) -> None:
    """Close everything, also what was accepted and is not yet known: an unclosed transport fails some later test."""
    # Server.close() comes later: asyncio leaks a connection that it accepted before and wraps after.
    for listener in server.sockets:
        asyncio.get_running_loop().remove_reader(listener.fileno())
    for _ in range(3):  # iterations of the loop between accept() and `connected`
        await asyncio.sleep(0)
    server.close()
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0)  # transports close their sockets in the next iteration
