"""The address of a gateway's reply port in a real Redis, which is reached by TCP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis

from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit.ports import free_port
from tests.kit.redis_server import redis_server

GATEWAY = "0-7-ab"
KEYS = InstallationKeys("test")
KEY = KEYS.pool("cpu").reply_address(GATEWAY)
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisAddress]:
    port = free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1")
    with redis_server(choose_binary(""), tmp_path_factory.mktemp("redis"), *options):
        yield RedisAddress.parse(f"redis://127.0.0.1:{port}/0")


@pytest.fixture
def stored(address: RedisAddress) -> Iterator[redis.Redis]:
    with client(address) as connection:
        connection.flushall()
        yield connection
        connection.config_set("maxmemory", 0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


def fill(stored: redis.Redis) -> None:
    """Leave Redis no memory."""
    stored.set("fill", bytes(2_000_000))
    stored.config_set("maxmemory", 1_000_000)


def clock_reads(stored: redis.Redis) -> int:
    return int(stored.info("commandstats")["cmdstat_time"]["calls"])


def test_a_redis_without_memory_costs_a_gateway_the_address_and_no_check(address, stored, caplog):
    restored: list[bool] = []

    async def test() -> None:
        link = ProducerLink(address, KEYS.pool("cpu"), GATEWAY, lambda _: None, restored.append, lambda *_: None)
        await link.start()
        link.reply_address = b"00 80 127.0.0.1"
        fill(stored)
        read = clock_reads(stored)
        await link.refresh()
        await link.refresh()
        assert clock_reads(stored) == read + 2
        assert stored.get(KEY) is None
        stored.config_set("maxmemory", 0)
        stored.flushall()
        await link.refresh()
        assert stored.get(KEY) == b"00 80 127.0.0.1"
        assert restored == [False, True], "that the data were lost was noticed"
        await link.stop()

    run(test)
    assert caplog.text.count("the address of the reply port was refused") == 1
