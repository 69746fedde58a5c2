"""A TLS proxy in front of a server without TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        writers = [writer]
        try:
            await writer.start_tls(context)
            if address.path is not None:
                back_reader, back_writer = await asyncio.open_unix_connection(address.path)
            else:
                back_reader, back_writer = await asyncio.open_connection(address.host, address.port)
            writers.append(back_writer)
            await asyncio.gather(pass_on(reader, back_writer), pass_on(back_reader, writer))
        except (OSError, asyncio.CancelledError):  # the client does not trust the certificate, or the test ended
            pass
        finally:
            for one in writers:
                one.transport.abort()
                with suppress(OSError):
                    await one.wait_closed()

    # `ssl=context` is not used: it does not report when a connection whose handshake failed is closed.
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
