"""What keeps installations apart on one Redis, and a pool together on one shard."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from millstream.services.queue.cluster_state import ClusterState
from millstream.services.queue.death_notices import Death, publish_death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.server import choose_binary
from millstream.services.wire.records import State
from tests.kit.catalog import worker
from tests.kit.pool import ATTEMPTS_MAX, Pool, names
from tests.kit.ports import free_port
from tests.kit.redis_server import redis_server


@pytest.fixture
def others(pool: Pool) -> Iterator[Pool]:
    """Another installation with a pool of the same name."""
    another = Pool(pool.address, pool.name, "another")
    yield another
    another.close()


def test_an_installation_gets_nothing_of_another(pool, others):
    for each, name in ((pool, "ours"), (others, "theirs")):
        each.join("w", "m")
        each.put("m", name)
    assert names(others.next("w")) == ["theirs"]
    [ours] = pool.next("w")
    assert ours.header.name == "ours"
    others.silence("w")
    assert pool.reclaim() == (0, 0, 0)  # a worker of theirs is no business of ours
    assert pool.reclaim("w") == (1, 0, 1)
    assert others.reclaim() == (1, 1, 0)
    assert (pool.replies(), others.replies()) == ([b"\1ours"], [])
    others.join("v", "m")
    assert names(others.next("v")) == ["theirs"]
    for each, name in ((pool, "w"), (others, "w"), (others, "v")):
        each.worker(name).leave(ATTEMPTS_MAX)


def test_an_installation_sees_and_hears_nothing_of_another(pool, others):
    pool.worker("w").beat(worker(name="w").model_dump_json().encode(), 60_000)

    async def look() -> None:
        ours, theirs = (
            ClusterState(pool.address, pool.keys.of_installation),
            ClusterState(pool.address, others.keys.of_installation),
        )
        await ours.set_gateway("g", "token")
        await ours.set_upload("m", 1, State.CHECKING)
        assert [record.id for record in await ours.workers()] == ["w"]
        assert (await theirs.workers(), await theirs.gateways(), await theirs.uploads()) == ((), {}, {})
        news = theirs.messages()
        first = asyncio.ensure_future(anext(news))
        while not pool.redis.pubsub_numsub(others.keys.of_installation.changes)[0][1]:
            await asyncio.sleep(0)
        await ours.publish("model:ours")
        assert await publish_death(pool.address, pool.keys.of_installation, Death("cpu-0-1"))
        await theirs.publish("model:theirs")
        assert await first == "model:theirs"
        await news.aclose()  # type: ignore[attr-defined]
        await ours.close()
        await theirs.close()

    asyncio.run(asyncio.wait_for(look(), 120))
    pool.worker("w").leave(ATTEMPTS_MAX)


def test_every_key_has_the_protocol_and_the_installation_in_it(pool):
    """Also keys that this test does not know of: all keys in Redis are checked after every feature was used."""
    pool.join("w", "m", "n")
    pool.put("n", "b2", blob=b"x")
    pool.put("m", "b1", blob=b"x")
    [lease] = pool.next("w", wanted=1)
    pool.worker("w").run_alone(lease)
    pool.worker("w").remove_lane(lease.lane)
    pool.put("m", "b3")

    async def tell() -> None:
        cluster_state = ClusterState(pool.address, pool.keys.of_installation)
        await cluster_state.set_gateway("g", "token")
        await cluster_state.set_upload("m", 1, State.CHECKING)
        await cluster_state.close()

    asyncio.run(tell())
    kinds = {key.partition(b"}:")[0] for key in pool.redis.scan_iter()}
    assert kinds == {b"ms:3:{test", b"ms:3:{test:cpu"}
    pool.worker("w").leave(ATTEMPTS_MAX)


def test_two_names_never_make_one_key():
    pools = [InstallationKeys(instance).pool(name) for instance in ("a", "a-b", "a_b") for name in ("b", "a-b", "b.c")]
    assert len({pool.prefix for pool in pools} | {pool.of_installation.pools for pool in pools}) == 9 + 3


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Pool]:
    """One node that has all slots: what it refuses, every cluster would."""
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--bind", "127.0.0.1")
    with redis_server(choose_binary(""), tmp_path, *options) as address:
        pool = Pool(address)
        pool.redis.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        while pool.redis.cluster("INFO").get("cluster_state") != "ok":
            pass
        yield pool
        pool.close()


def test_a_script_touches_keys_of_one_slot(cluster):
    with pytest.raises(ResponseError, match="slot"):
        cluster.redis.eval("return redis.call('EXISTS', KEYS[1], KEYS[2])", 2, "a", "b")
    cluster.join("w", "m")
    cluster.put("m", "b1")
    cluster.put("m", "b2")
    [first] = cluster.next("w", wanted=1)
    assert cluster.worker("w").recover([first]) == []
    cluster.next("w", first)
    cluster.silence("w")
    assert cluster.reclaim() == (1, 1, 0)
    assert not cluster.worker("w").beat(b"{}", 60_000)
    cluster.worker("w").add_lanes(["m"])
    [second] = cluster.next("w")
    cluster.worker("w").remove_lane("m")
    cluster.next("w", second, wanted=0)
    cluster.worker("w").remove_lane("m")
    cluster.worker("w").leave(ATTEMPTS_MAX)
    assert cluster.replies() == [b"b1 1 w", b"b2 2 w"]
