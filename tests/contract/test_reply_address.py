"""The address of a gateway's reply port in a real Redis, which is reached by TCP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis

from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.scheduling.producer import Producer, ReplyWays
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue import reply_port
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.reply_protocol import ReplyAddress
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

    class Port:
        def listen(self, host: str) -> bool:
            self.host = host
            return True

        def address(self, pool: str) -> ReplyAddress:
            return ReplyAddress(self.host, 80, b"\0")

    async def test() -> None:
        link = ProducerLink(address, KEYS.pool("cpu"), GATEWAY, lambda _: None, restored.append, lambda *_: None)
        await link.start()
        link.reply_port = Port()  # type: ignore[assignment]
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


def test_a_gateway_whose_port_is_in_use_opens_it_when_it_is_free(address, stored, monkeypatch, caplog):
    monkeypatch.setattr(reply_port, "PORTS_TRIED", 1)

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            producer = Producer(
                address, KEYS, GATEWAY, LaneTable(), MetricsRegistry(None, "g"), 2.0, ReplyWays(port=port)
            )
            link = await producer.link("cpu")
            await link.refresh()
            assert stored.get(KEY) is None
        await link.refresh()
        assert ReplyAddress.decode(stored.get(KEY))[:2] == ("127.0.0.1", port)
        await producer.stop()

    run(test)
    assert caplog.text.count("no port on 127.0.0.1") == 1
    assert caplog.text.count("no other host can send replies to 127.0.0.1") == 1
