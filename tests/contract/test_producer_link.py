"""A gateway's connections to a real Redis, which is reached through a proxy by TCP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import redis

from millstream.services.errors import Failure
from millstream.services.queue import producer_link, url
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit.ports import free_port
from tests.kit.redis_server import redis_server
from tests.kit.tcp_proxy import TcpProxy

TIMEOUT_S = 120
WAIT_S = 0.3
OUT, REPLIES = 0, 1  # the order in which a link opens its connections


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1")
    with redis_server(choose_binary(""), tmp_path_factory.mktemp("redis"), *options):
        yield f"127.0.0.1:{port}"


@pytest.fixture
def stored(server: str) -> Iterator[redis.Redis]:
    with client(RedisAddress.parse(f"redis://{server}")) as connection:
        yield connection


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    monkeypatch.setattr(producer_link, "REPLY_WAIT_S", WAIT_S)
    proxy = TcpProxy(server)
    yield proxy
    proxy.close()


@asynccontextmanager
async def linked(proxy: TcpProxy, gateway: str, received: list[bytes]) -> AsyncIterator[ProducerLink]:
    address = RedisAddress.parse(f"redis://{proxy.address}")
    keys = InstallationKeys("test").pool("cpu")
    link = ProducerLink(address, keys, gateway, received.append, lambda _: None, lambda *_: None)
    await link.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield link
    finally:
        await link.stop()


async def receive(link: ProducerLink, stored: redis.Redis, received: list[bytes], reply: bytes) -> None:
    """Receive a reply; it is sent again to the list of each connection."""
    lists: set[bytes] = set()
    while reply not in received:
        if link.replies_key not in lists:
            lists.add(link.replies_key)
            stored.rpush(link.replies_key, reply)
        await asyncio.sleep(0.01)


def test_an_idle_link_keeps_its_connections(proxy: TcpProxy, stored: redis.Redis) -> None:
    async def test() -> None:
        received: list[bytes] = []
        async with linked(proxy, "idle", received) as link:
            for _ in range(10 * producer_link.REQUESTS_AHEAD):  # more BLMPOPs end than are sent ahead
                await link.refresh()
                await asyncio.sleep(WAIT_S / 8)
            await receive(link, stored, received, b"one")
            assert link.reconnects == 0

    asyncio.run(test())


@pytest.mark.parametrize("silent", [OUT, REPLIES], ids=["out", "replies"])
def test_a_connection_that_is_lost_without_a_word_is_noticed(
    proxy: TcpProxy, stored: redis.Redis, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    monkeypatch.setattr(url, "REPLY_S_MAX", 1.0)

    async def test() -> None:
        received: list[bytes] = []
        async with linked(proxy, f"lost-{silent}", received) as link:
            await receive(link, stored, received, b"before")
            proxy.silence(silent)
            while not link.reconnects:
                with suppress(Failure):  # while it is not connected
                    await link.refresh()
                await asyncio.sleep(0.05)
            await receive(link, stored, received, b"after")

    asyncio.run(test())


def test_a_stopped_gateway_takes_no_connection_for_lost(
    proxy: TcpProxy, stored: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock went on, and what Redis answered meanwhile waits to be read."""
    monkeypatch.setattr(url, "REPLY_S_MAX", 1.0)

    async def test() -> None:
        received: list[bytes] = []
        async with linked(proxy, "stopped", received) as link:
            await receive(link, stored, received, b"before")
            time.sleep(producer_link.REPLY_WAIT_S + url.REPLY_S_MAX + 0.5)
            await link.refresh()
            assert link.reconnects == 0

    asyncio.run(test())
