"""Every kind of connection finds the master that real sentinels name, and no other server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from redis.exceptions import RedisError

from millstream.services.errors import Failure
from millstream.services.queue.consumer_link import ConsumerLink
from millstream.services.queue.pipeline import connect
from millstream.services.queue.server import check_server
from millstream.services.queue.url import RedisAddress, async_client, client
from tests.kit.sentinel import NAME, NEVER_MS, PASSWORD, Watched, watched_redis
from tests.kit.tls import AUTHORITY, tls_before

Look = Callable[[RedisAddress], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_redis(tmp_path_factory.mktemp("sentinel") / "redis", NEVER_MS) as started:
        yield started


async def by_client(address: RedisAddress) -> Any:
    def get() -> Any:
        with client(address, retries=0) as redis:
            return redis.get("who")

    return await asyncio.to_thread(get)


async def by_async_client(address: RedisAddress) -> Any:
    async with async_client(address, retries=0) as redis:
        return await redis.get("who")


async def by_link(address: RedisAddress) -> Any:
    def get() -> Any:
        link = ConsumerLink(address)
        try:
            return link.call("GET", "who")
        finally:
            link.close()

    return await asyncio.to_thread(get)


async def by_pipeline(address: RedisAddress) -> Any:
    pipeline = await connect(address)
    try:
        return await pipeline.call("GET", "who")
    finally:
        pipeline.close()


all_kinds = pytest.mark.parametrize("look", [by_client, by_async_client, by_link, by_pipeline])


def changed(watched: Watched, old: str, new: str) -> RedisAddress:
    assert old in watched.address.url
    return RedisAddress.parse(watched.address.url.replace(old, new))


@all_kinds
def test_the_master_is_found_with_its_password_and_database(watched: Watched, look: Look) -> None:
    with client(watched.address) as redis:
        redis.set("who", "the master")
        assert redis.client_info()["db"] == 1
    assert asyncio.run(look(watched.address)) == b"the master"


@all_kinds
def test_a_sentinel_that_is_not_there_or_does_not_know_is_passed_over(watched: Watched, look: Look) -> None:
    with client(watched.address) as redis:
        redis.set("who", "the master")
    unreachable = "127.0.0.1:1"
    other = f"127.0.0.1:{watched.sentinels[1].port}"
    watched.sentinels[0].redis.sentinel_remove(NAME)
    try:
        assert asyncio.run(look(changed(watched, other, unreachable))) == b"the master"
    finally:
        watched.introduce(watched.sentinels[0], NAME, watched.master.port)


@all_kinds
def test_what_the_sentinels_do_not_name_is_not_found(watched: Watched, look: Look) -> None:
    for old, new, says in (
        (f"/{NAME}/", "/stranger/", "does not know this name"),
        ("sentinel_password=", "sentinel_password=x", "invalid username-password"),
    ):
        with pytest.raises((RedisError, Failure), match=says) as failure:
            asyncio.run(look(changed(watched, old, new)))
        assert PASSWORD not in str(failure.value)


@all_kinds
def test_a_replica_that_is_named_as_the_master_is_not_used(watched: Watched, look: Look) -> None:
    """As by a sentinel that did not learn yet that it was demoted."""
    sentinel = watched.sentinels[0]
    watched.introduce(sentinel, "late", watched.other(watched.master).port)
    try:
        with pytest.raises((RedisError, Failure), match="not a master"):
            asyncio.run(look(changed(watched, f"/{NAME}/", "/late/")))
    finally:
        sentinel.redis.sentinel_remove("late")


def test_the_check_at_start_says_what_is_wrong(watched: Watched) -> None:
    assert asyncio.run(check_server(watched.address)).startswith(("7.", "8.", "9."))
    with pytest.raises(Failure, match="no sentinel names a master 'stranger'") as failure:
        asyncio.run(check_server(changed(watched, f"/{NAME}/", "/stranger/")))
    assert PASSWORD not in failure.value.message


@all_kinds
def test_tls_to_the_sentinel_and_to_the_master(watched: Watched, look: Look) -> None:
    sentinel, master = watched.sentinels[0], watched.master
    with client(watched.address) as redis:
        redis.set("who", "the master")

    async def check() -> None:
        async with (
            tls_before(RedisAddress.parse(f"redis://127.0.0.1:{sentinel.port}")) as sentinel_port,
            tls_before(RedisAddress.parse(f"redis://127.0.0.1:{master.port}")) as port,
        ):
            watched.introduce(sentinel, "sealed", port)
            query = watched.address.url.partition("?")[2]
            who = watched.address.url.partition("://")[2].partition("@")[0]
            url = f"rediss+sentinel://{who}@127.0.0.1:{sentinel_port}/sealed/1?{query}"
            assert await look(RedisAddress.parse(f"{url}&{AUTHORITY}")) == b"the master"
            with pytest.raises((RedisError, Failure), match="certificate verify failed"):
                await look(RedisAddress.parse(url))

    try:
        asyncio.run(check())
    finally:
        sentinel.redis.sentinel_remove("sealed")
