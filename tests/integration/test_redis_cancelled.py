"""Calls to Redis end when they are cancelled, at whatever moment: Python 3.11 drops some cancellations of writes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis.asyncio

from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, async_client
from tests.kit.redis_server import redis_server

TRIES = 150
SPAN_S_MAX = 0.01
CALLS_MAX = 20_000  # of a loop that is not ended; a span holds a few hundred


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisAddress]:
    with redis_server(choose_binary(""), tmp_path_factory.mktemp("redis")) as address:
        yield address


async def _get(client: redis.asyncio.Redis) -> None:
    await client.hgetall("key")


async def _pipeline(client: redis.asyncio.Redis) -> None:
    pipeline = client.pipeline(transaction=False)
    pipeline.get("one")
    pipeline.get("two")
    assert await pipeline.execute() == [None, None]


@pytest.mark.parametrize("call", [_get, _pipeline])
def test_a_time_limit_ends_a_loop_of_calls(
    address: RedisAddress, call: Callable[[redis.asyncio.Redis], Awaitable[None]]
) -> None:
    async def endless(client: redis.asyncio.Redis) -> None:
        for _ in range(CALLS_MAX):
            await call(client)
        raise AssertionError("its time limit did not end it")

    async def limited() -> None:
        client = async_client(address)
        dice = random.Random(0)
        for _ in range(TRIES):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(dice.uniform(0, SPAN_S_MAX)):
                    await endless(client)
        assert await client.ping(), "its connections are usable"
        await client.aclose()

    asyncio.run(limited())


def test_a_task_that_calls_ends_when_it_is_cancelled(address: RedisAddress) -> None:
    async def cancelled() -> None:
        client = async_client(address)
        dice = random.Random(1)
        for _ in range(TRIES):
            task = asyncio.ensure_future(_forever(client))
            await asyncio.sleep(dice.uniform(0, SPAN_S_MAX))
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=300)
            assert done, "it goes on"
            assert task.cancelled()
        await client.aclose()

    async def _forever(client: redis.asyncio.Redis) -> None:
        while True:
            await _get(client)

    asyncio.run(cancelled())
