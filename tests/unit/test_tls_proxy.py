"""The TLS proxy of the tests closes every connection, also one that arrives as it ends."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

from millstream.services.queue.url import RedisAddress
from tests.kit.tls import tls_before


def test_connections_that_arrive_as_the_proxy_ends_are_closed() -> None:
    async def leave_after(iterations: int) -> None:
        async with tls_before(RedisAddress.parse("redis://127.0.0.1:1")) as port:
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(b"not TLS")
            for _ in range(iterations):
                await asyncio.sleep(0)
        client.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iterations in range(12):
            asyncio.run(leave_after(iterations))
        gc.collect()
