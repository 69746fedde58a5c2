"""What processes tell each other through Redis beside the queue, on a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.queue import cluster_state as cluster_state_module
from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.death_notices import Death, publish_death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from millstream.services.queue.worker_records import WorkerRecords
from millstream.services.wire.records import InstanceRecord, State
from tests.kit.catalog import worker
from tests.kit.pool import Pool
from tests.kit.redis_server import redis_server
from tests.kit.stack import sigstopped

KEYS = InstallationKeys("test")
TRIES = 20
LIFE_S = 600.0  # nothing is forgotten because this machine lets the test wait


@pytest.fixture(autouse=True)
def lives(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATEWAY_LIFE_S", "KEYS_READ_LIFE_S", "UPLOAD_LIFE_S"):
        monkeypatch.setattr(cluster_state_module, name, LIFE_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisAddress]:
    with redis_server(choose_binary(""), tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture
def address(server: RedisAddress) -> RedisAddress:
    with client(server) as redis:
        redis.flushall()
    return server


def age(address: RedisAddress, key: bytes, seconds: float) -> None:
    """As if all that the hash holds had been written so long ago."""
    with client(address) as redis:
        for field, value in redis.hgetall(key).items():
            words = value.decode().split(" ")
            at = next(index for index, word in enumerate(words) if word[:1].isdigit())
            words[at] = f"{float(words[at]) - seconds:.3f}"
            redis.hset(key, field, " ".join(words))


def test_workers_are_those_whose_records_live(address):
    pools = {"gpu": Pool(address, "gpu"), "cpu": Pool(address, "cpu")}
    for pool, name in (("gpu", "g"), ("cpu", "b"), ("cpu", "a"), ("cpu", "silent")):
        pools[pool].worker(name).beat(worker(name=name, pool=pool).model_dump_json().encode(), 60_000)
    pools["cpu"].redis.delete(KEYS.pool("cpu").record("silent"))
    pools["cpu"].redis.sadd(KEYS.pools, "empty")

    async def look() -> None:
        cluster_state = ClusterState(address, KEYS)
        assert [record.id for record in await cluster_state.workers()] == ["a", "b", "g"]
        pools["gpu"].worker("g").leave(3)
        assert [record.id for record in await cluster_state.workers()] == ["a", "b"]
        pools["cpu"].redis.set(KEYS.pool("cpu").record("a"), b'{"id": 1}')
        assert [record.id for record in await cluster_state.workers()] == ["b"]  # it hides no record but itself
        assert cluster_state.unreadable == {"a"}
        newer = json.loads(worker(name="a").model_dump_json()) | {"batch_formats": [3, 9], "mood": {"good": True}}
        newer["instances"] = [
            {"state": "dreaming"},
            {"state": "ready", "content_id": "r", "model": "m", "version": 1, "x": 1},
        ]
        pools["cpu"].redis.set(KEYS.pool("cpu").record("a"), json.dumps(newer))
        first, _ = await cluster_state.workers()
        assert (first.id, first.batch_formats, [one.content_id for one in first.instances]) == ("a", (3, 9), ["r"])
        assert cluster_state.unreadable == frozenset()
        pools["cpu"].redis.hset(KEYS.gateways, "newer", "{}")
        pools["cpu"].redis.hset(KEYS.uploads, "m/1", "dreaming 9e9")
        pools["cpu"].redis.hset(KEYS.uploads, "m/x", f"{State.CHECKING.value} 9e9")
        await cluster_state.set_gateway("g", "token")
        await cluster_state.set_upload("m", 2, State.CHECKING)
        assert (await cluster_state.gateways(), await cluster_state.uploads()) == (
            {"g": "token"},
            {("m", 2): State.CHECKING},
        )
        await cluster_state.close()

    asyncio.run(look())
    for pool_ in pools.values():
        pool_.close()


def test_a_gateway_exchanges_all_that_it_needs_and_is_listed(address):
    pool = Pool(address, "cpu")

    async def look() -> None:
        cluster_state = ClusterState(address, KEYS)
        assert await cluster_state.exchange("g", None) == ((), {})
        assert await cluster_state.gateways() == {}
        for names in (["a"], ["a", "b"]):
            pool.worker(names[-1]).beat(worker(name=names[-1]).model_dump_json().encode(), 60_000)
            await cluster_state.set_upload("m", len(names), State.CHECKING)
            exchanged = await cluster_state.exchange("g", f"token-{len(names)}")
            assert [one.id for one in exchanged.workers] == names
            assert exchanged.uploads == {("m", number + 1): State.CHECKING for number in range(len(names))}
            assert await cluster_state.gateways() == {"g": f"token-{len(names)}"}
        pool.worker("a").leave(3)
        with client(address) as redis:
            redis.config_resetstat()
            assert [one.id for one in (await cluster_state.exchange("g", "token-2")).workers] == ["b"]
            calls = {name: facts["calls"] for name, facts in redis.info("commandstats").items()}
        assert (calls["cmdstat_zrange"], calls["cmdstat_mget"], calls["cmdstat_hset"]) == (1, 1, 1)
        await cluster_state.close()
        pool.close()

    asyncio.run(look())


def test_a_gateway_sees_that_workers_are_gone_while_redis_takes_no_writes(address):
    pool = Pool(address, "cpu")
    pool.worker("w").beat(worker(name="w").model_dump_json().encode(), 60_000)

    async def look() -> None:
        cluster_state = ClusterState(address, KEYS)
        assert len((await cluster_state.exchange("g", "token")).workers) == 1
        await cluster_state.set_upload("m", 1, State.CHECKING)
        age(address, KEYS.uploads, LIFE_S)  # its gateway died; to remove it is a write
        with client(address) as redis:
            redis.config_set("min-replicas-to-write", 1)
            try:
                with pytest.raises(Failure):
                    await cluster_state.set_gateway("g", "token")
                assert len((await cluster_state.exchange("g", "token")).workers) == 1
                redis.config_set("min-replicas-to-write", 0)
                redis.delete(KEYS.pool("cpu").record("w"))
                redis.config_set("min-replicas-to-write", 1)
                assert await cluster_state.exchange("g", "token") == ((), {})
            finally:
                redis.config_set("min-replicas-to-write", 0)
        await cluster_state.close()
        pool.close()

    asyncio.run(look())


def test_reads_at_once_find_the_same_instances(address, monkeypatch):
    """The controller's parts share one reader, and one of them may find a worker gone that another one sees again."""
    pool = Pool(address, "cpu")
    keys = KEYS.pool("cpu")
    held = InstanceRecord(content_id="m:1:x", model="m", version=1, state=State.READY)
    record = worker(name="w").model_copy(update={"instances_version": 1, "changed_since": 1})
    pool.worker("w").beat(record.model_dump_json().encode(), 60_000)
    pool.redis.hset(keys.instances("w"), held.content_id, held.model_dump_json())
    stored = pool.redis.get(keys.record("w"))
    fetch = WorkerRecords._changed_instances
    gates: list[asyncio.Event] = []

    async def slow(self: WorkerRecords, stored: Any) -> Any:
        found = await fetch(self, stored)
        gates.append(asyncio.Event())
        await gates[-1].wait()
        return found

    async def look() -> None:
        cluster_state = ClusterState(address, KEYS)
        assert [len(one.instances) for one in await cluster_state.workers()] == [1]
        monkeypatch.setattr(WorkerRecords, "_changed_instances", slow)
        pool.redis.delete(keys.record("w"))
        first = asyncio.ensure_future(cluster_state.workers())
        while not gates:
            await asyncio.sleep(0)
        pool.redis.set(keys.record("w"), stored)
        second = asyncio.ensure_future(cluster_state.workers())
        await asyncio.sleep(0.1)  # time enough to read, if it did not wait for the first one
        gates[0].set()
        assert await first == ()
        while len(gates) < 2:
            await asyncio.sleep(0)
        gates[1].set()
        assert [len(one.instances) for one in await second] == [1]
        await cluster_state.close()
        pool.close()

    asyncio.run(look())


def test_entries_of_streams_are_those_that_wait_and_those_that_are_leased(address):
    pool = Pool(address)
    pool.join("w", "m")
    for name in ("b1", "b2", "b3"):
        pool.put("m", name)
    pool.next("w", wanted=1)

    async def count() -> list[int]:
        cluster_state = ClusterState(address, KEYS)
        counts = await cluster_state.stream_entries("cpu", ["m", "nothing"])
        assert await cluster_state.stream_entries("cpu", []) == []
        await cluster_state.close()
        return counts

    assert asyncio.run(count()) == [3, 0]
    pool.close()


def test_uploads_are_seen_until_they_end_or_are_forgotten(address):
    async def upload() -> None:
        cluster_state = ClusterState(address, KEYS)
        await cluster_state.set_upload("m", 3, State.CHECKING)
        await cluster_state.set_upload("m", None, State.RECEIVING)
        assert await cluster_state.uploads() == {("m", 3): State.CHECKING, ("m", None): State.RECEIVING}
        age(address, KEYS.uploads, LIFE_S)
        await cluster_state.set_upload("m", 3, State.CHECKING)
        assert await cluster_state.uploads() == {("m", 3): State.CHECKING}  # the other one's gateway died
        with client(address) as redis:
            assert redis.hlen(KEYS.uploads) == 1
        await cluster_state.set_upload("m", None, None)
        await cluster_state.set_upload("m", 3, None)
        assert await cluster_state.uploads() == {}
        await cluster_state.close()

    asyncio.run(upload())


def test_gateways_are_those_that_said_so_of_late(address):
    async def look() -> None:
        cluster_state = ClusterState(address, KEYS)
        await cluster_state.set_gateway("a", "token-a")
        await cluster_state.set_gateway("b", "token-b")
        assert await cluster_state.gateways() == {"a": "token-a", "b": "token-b"}
        age(address, KEYS.gateways, LIFE_S)
        await cluster_state.set_gateway("b", "token-b")
        assert await cluster_state.gateways() == {"b": "token-b"}
        with client(address) as redis:
            assert redis.hlen(KEYS.gateways) == 1
        await cluster_state.set_gateway("b", None)
        assert await cluster_state.gateways() == {}
        await cluster_state.close()

    asyncio.run(look())


def test_a_gateway_is_listed_no_longer_if_the_clock_is_set_back(address):
    async def look() -> None:
        cluster_state = ClusterState(address, KEYS)
        await cluster_state.set_gateway("gone", "token")
        await cluster_state.tell_keys_read("gone", 1)
        await cluster_state.exchange_use("gone", "text")
        for key in (KEYS.gateways, KEYS.keys_read, KEYS.use):
            age(address, key, -3600)
        for _ in range(2):  # they are not older the second time
            assert await cluster_state.gateways() == {"gone": "token"}
            assert await cluster_state.keys_read() == {"gone": 1}
            assert await cluster_state.exchange_use("a", None) == {"gone": "text"}
        for key in (KEYS.gateways, KEYS.keys_read, KEYS.use):
            age(address, key, LIFE_S)
        assert (await cluster_state.gateways(), await cluster_state.keys_read()) == ({}, {})
        assert await cluster_state.exchange_use("a", None) == {}
        await cluster_state.close()

    asyncio.run(look())


def test_gateways_tell_which_change_of_the_keys_they_have_read(address):
    async def look() -> None:
        cluster_state = ClusterState(address, KEYS)
        assert await cluster_state.tell_keys_read("a", 0) == 0
        assert await cluster_state.tell_keys_read("gone", 0) == 0
        age(address, KEYS.keys_read, LIFE_S)
        assert await cluster_state.keys_changed() == 1
        assert await cluster_state.tell_keys_read("a", 0) == 1
        assert await cluster_state.tell_keys_read("b", 1) == 1
        assert await cluster_state.keys_read() == {"a": 0, "b": 1}
        with client(address) as redis:
            redis.hset(KEYS.keys_read, "newer", "{} of another release")
        assert await cluster_state.keys_changed() == 2
        assert await cluster_state.keys_read() == {"a": 0, "b": 1}
        await cluster_state.close()

    asyncio.run(look())


def test_clocks_of_machines_do_not_matter(address, monkeypatch):
    """What one machine wrote until when counts as long in the eyes of every other, and in no other's eyes it is old."""

    async def look() -> None:
        cluster_state = ClusterState(address, KEYS)
        pool = Pool(address, "cpu")
        for ahead_s in (0.0, 86_400.0, -86_400.0):
            right = time.time
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda ahead_s=ahead_s, right=right: right() + ahead_s)
                await cluster_state.set_gateway(f"g{ahead_s:g}", "token")
                await cluster_state.set_upload("m", round(abs(ahead_s)) + 1, State.CHECKING)
                pool.worker("w").beat(worker(name="w").model_dump_json().encode(), 60_000)
                [record] = await cluster_state.workers()
                assert abs(time.time() - record.heartbeat) < LIFE_S
        assert sorted(await cluster_state.gateways()) == ["g-86400", "g0", "g86400"]
        assert len(await cluster_state.uploads()) == 2
        await cluster_state.close()
        pool.close()

    asyncio.run(look())


def test_news_reach_everybody_who_listens(address):
    async def listen() -> None:
        cluster_state, other = ClusterState(address, KEYS), ClusterState(address, KEYS)
        news = other.messages()
        first = asyncio.ensure_future(anext(news))
        with client(address) as redis:
            while not redis.pubsub_numsub(KEYS.changes)[0][1]:
                await asyncio.sleep(0)
        await cluster_state.publish("model:digits")
        assert await first == "model:digits"
        assert await publish_death(address, KEYS, Death("cpu-0-17"))
        assert await anext(news) == "died:cpu-0-17"
        await news.aclose()  # type: ignore[attr-defined]
        await cluster_state.close()
        await other.close()

    asyncio.run(listen())


def test_who_listens_to_nobody_is_told(address):
    """A server that vanished, or froze, ends no connection."""

    async def listen() -> None:
        cluster_state = ClusterState(address, KEYS, quiet_s=1)
        with client(address) as redis:
            server = redis.info("server")["process_id"]
            for _ in range(TRIES):
                redis.config_resetstat()
                first = asyncio.ensure_future(anext(cluster_state.messages()))
                while not first.done() and pings(redis) < 2:
                    await asyncio.sleep(0.01)
                if not first.done():  # no event comes, but Redis is there
                    break
                with pytest.raises(Failure, match="does not answer"):
                    await first  # this machine let one of them wait for a second
            else:
                raise AssertionError("Redis never answered in time")
        with sigstopped(server), pytest.raises(Failure, match="does not answer"):
            async with asyncio.timeout(120):
                await first
        await cluster_state.close()

    asyncio.run(listen())


def pings(redis: Any) -> int:
    """How often Redis was asked whether it is there."""
    return int(redis.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"])


def test_without_redis_every_call_says_so(tmp_path):
    nowhere = RedisAddress.unix(str(tmp_path / "no.sock"))

    async def ask() -> None:
        cluster_state = ClusterState(nowhere, KEYS)
        failures = await asyncio.gather(
            cluster_state.workers(),
            cluster_state.stream_entries("cpu", ["m"]),
            cluster_state.uploads(),
            cluster_state.set_upload("m", 1, State.CHECKING),
            cluster_state.publish("model:m"),
            anext(cluster_state.messages()),
            return_exceptions=True,
        )
        for failure in failures:
            assert isinstance(failure, Failure)
            assert "not reachable" in failure.message
            assert (failure.code, failure.retry_after_s) == (Code.UNAVAILABLE, 1)
        assert not await publish_death(nowhere, KEYS, Death("cpu-0-17"))
        await cluster_state.close()

    asyncio.run(ask())
