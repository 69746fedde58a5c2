"""A Redis that is frozen, or a route to it that loses everything: each call ends, and delays nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing

import pytest

from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.scheduling.producer import Producer
from millstream.gateway.scheduling.reclaimer import CircuitBreaker, Reclaimer
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.services.errors import Failure
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue import url
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.death_notices import Death, publish_death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.log_levels import StoredLogLevels
from millstream.services.queue.pipeline import RedisClock
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from millstream.workers.batches.consumer import Consumer
from tests.kit.ports import free_port
from tests.kit.redis_server import redis_server
from tests.kit.stack import sigstopped
from tests.kit.tcp_proxy import TcpProxy

KEYS = InstallationKeys("test")
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisAddress, str]]:
    """The address of the socket, and the one of TCP."""
    port = free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1")
    with redis_server(choose_binary(""), tmp_path_factory.mktemp("redis"), *options) as address:
        yield address, f"127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url, "REPLY_S_MAX", 0.5)


def pid_of(address: RedisAddress) -> int:
    with client(address) as redis:
        return int(redis.info("server")["process_id"])


@pytest.mark.parametrize("way", ["socket", "tcp"])
@pytest.mark.parametrize("known", [False, True], ids=["new connection", "known connection"])
def test_every_call_of_a_frozen_redis_ends(server: tuple[RedisAddress, str], way: str, known: bool) -> None:
    address = server[0] if way == "socket" else RedisAddress.parse(f"redis://{server[1]}")

    async def ask() -> None:
        cluster_state, scale_state = ClusterState(address, KEYS), ScaleState(address, KEYS)
        levels = StoredLogLevels(address, KEYS)
        if known:
            await asyncio.gather(cluster_state.pools(), cluster_state.uploads(), scale_state.decisions(), levels.read())
        calls: list[Callable[[], Awaitable[object]]] = [
            cluster_state.pools,
            lambda: cluster_state.stream_entries("cpu", ["m"]),
            lambda: anext(cluster_state.messages()),
            scale_state.decisions,
            levels.read,
        ]
        async with asyncio.timeout(TIMEOUT_S):
            with sigstopped(pid_of(server[0])):
                ends = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
                assert all(isinstance(end, Failure) and "no answer within 0.5 s" in end.message for end in ends), ends
                assert not await publish_death(address, KEYS, Death("cpu-1-a"))
            await asyncio.gather(cluster_state.pools(), scale_state.decisions(), levels.read())
            assert await publish_death(address, KEYS, Death("cpu-1-a"))
        for one in (cluster_state, scale_state, levels):
            await one.close()

    asyncio.run(ask())


def test_a_silent_pool_delays_no_other_pool(server: tuple[RedisAddress, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool a is asked over connections that lose everything; pool b is looked after all the time."""
    monkeypatch.setattr(url, "REPLY_S_MAX", float(TIMEOUT_S))
    looks: list[str] = []
    proxy = TcpProxy(server[1])

    async def test() -> None:
        registry = MetricsRegistry(None, "g")
        producers = [
            Producer(RedisAddress.parse(f"redis://{at}"), KEYS, f"g-{pool}", LaneTable(), registry, 2.0)
            for pool, at in (("a", proxy.address), ("b", server[1]))
        ]
        links = {pool: await one.link(pool) for pool, one in zip("ab", producers, strict=True)}

        def link_of(pool: str) -> ProducerLink:
            looks.append(pool)
            return links[pool]

        breaker = CircuitBreaker(link_of, LaneTable(), registry)
        reclaimer = asyncio.create_task(Reclaimer(links, breaker, registry, 0.1, [links]).run())
        async with asyncio.timeout(TIMEOUT_S / 2):
            while {*looks} != {"a", "b"}:
                await asyncio.sleep(0.01)
            for connection in range(2):
                proxy.silence(connection)
            await asyncio.sleep(0.1)
            looks.clear()
            while looks.count("b") < 5:
                await asyncio.sleep(0.01)
        reclaimer.cancel()
        await asyncio.gather(reclaimer, return_exceptions=True)
        for one in producers:
            await one.stop()

    with closing(proxy):
        asyncio.run(test())


def test_a_consumer_with_a_limit_of_its_own_keeps_it(
    server: tuple[RedisAddress, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url, "REPLY_S_MAX", float(TIMEOUT_S))
    with closing(TcpProxy(server[1])) as proxy:
        address = RedisAddress.parse(f"redis://{proxy.address}")
        with closing(Consumer(address, KEYS.pool("cpu"), "w", RedisClock(), reply_s_max=0.5)) as consumer:
            consumer.add_lanes(["m"])
            proxy.silence(0)
            began = time.monotonic()
            with pytest.raises(Failure, match="connection to Redis was lost"):
                consumer.remove_lane("m")
            assert time.monotonic() - began < TIMEOUT_S / 2
