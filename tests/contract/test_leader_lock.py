"""The lock of the leading controller, and the orders that only it gives, on every Redis server that is to be had."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.queue.cluster_state import ClusterState, Leader
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.leader_lock import Delivery, Lead, LeaderLock
from millstream.services.queue.url import RedisAddress
from millstream.services.wire.orders import Order
from tests.kit.wait import wait_until

KEYS = InstallationKeys("test")
CPU = KEYS.pool("cpu")


def with_locks(address: RedisAddress, steps: Callable[..., Awaitable[None]], *names: str, life_s: float = 60) -> None:
    """Run `steps` with a lock for each name."""

    async def run() -> None:
        locks = [LeaderLock(address, KEYS, name, life_s) for name in names]
        try:
            await steps(*locks)
        finally:
            for lock in locks:
                await lock.close()

    asyncio.run(run())


def order(token: int, content_id: str = "m:1:c") -> Order:
    return Order(do="load", content_id=content_id, why="its second instance", token=token)


def test_one_leads_until_its_lead_expires(redis_address, stored):
    async def steps(first: LeaderLock, second: LeaderLock) -> None:
        led = await first.acquire()
        assert led.token > 0
        assert led.leader == "first"
        assert await second.acquire() == Lead(0, "first")
        assert await first.acquire() == led  # renewed: the same token
        assert 0 < stored.pttl(KEYS.leader) <= 60_000
        stored.pexpire(KEYS.leader, 1)
        wait_until(lambda: not stored.exists(KEYS.leader), what="expired")
        taken = await second.acquire()
        assert taken.token > led.token
        assert await first.acquire() == Lead(0, "second")

    with_locks(redis_address, steps, "first", "second")


def test_a_lead_that_is_released_is_taken_at_once(redis_address, stored):
    async def steps(first: LeaderLock, second: LeaderLock) -> None:
        token = (await first.acquire()).token
        assert not await second.release(token)
        assert not await first.release(token - 1)
        assert (await second.acquire()).token == 0
        assert await first.release(token)
        later = await second.acquire()
        assert later.token > token
        assert not await first.release(token)
        assert (await second.acquire()).token == later.token

    with_locks(redis_address, steps, "first", "second")


def test_tokens_grow_when_redis_lost_its_data_or_its_clock_was_set_back(redis_address, stored):
    async def steps(first: LeaderLock, second: LeaderLock) -> None:
        token = (await first.acquire()).token
        stored.flushall()
        again = (await second.acquire()).token
        assert again > token
        future = again + 10**9
        stored.set(KEYS.leader_token, future)
        stored.delete(KEYS.leader)
        assert (await first.acquire()).token == future + 1

    with_locks(redis_address, steps, "first", "second")


def test_a_lead_lasts_no_longer_if_the_clock_is_set_back(redis_address, stored):
    async def steps(first: LeaderLock, second: LeaderLock) -> None:
        led = await first.acquire()
        stored.pexpire(KEYS.leader, 3_600_000)  # as if the clock was an hour ahead
        assert await second.acquire() == Lead(0, "first")
        assert stored.pttl(KEYS.leader) <= 60_000
        stored.pexpire(KEYS.leader, 30_000)
        await second.acquire()
        assert stored.pttl(KEYS.leader) <= 30_000, "only its leader makes a lead longer"
        assert await first.acquire() == led

    with_locks(redis_address, steps, "first", "second")


def test_orders_of_an_earlier_leader_are_refused(redis_address, stored):
    stored.zadd(CPU.workers, {"w": 1})

    async def steps(first: LeaderLock, second: LeaderLock) -> None:
        assert await first.fence(["cpu", "gpu"], 5)
        assert await first.order("cpu", "w", order(5)) is Delivery.GIVEN
        assert await second.fence(["cpu"], 6)
        assert await first.order("cpu", "w", order(5, "m:2:c")) is Delivery.NEWER_LEADER
        assert not await first.fence(["gpu", "cpu"], 5)
        assert await second.order("cpu", "w", order(6, "m:3:c")) is Delivery.GIVEN
        assert await second.order("cpu", "gone", order(6)) is Delivery.WORKER_GONE
        stored.rpush(CPU.orders("w"), b'{"do": "dance"}')  # of another release
        waiting = await second.waiting_orders("cpu", "w")
        assert [(one.content_id, one.token) for one in waiting] == [("m:1:c", 5), ("m:3:c", 6)]
        assert stored.ttl(CPU.orders("w")) > 0
        assert stored.ttl(CPU.fence) > 0
        assert not stored.exists(CPU.orders("gone"))

    with_locks(redis_address, steps, "first", "second")


def test_orders_of_others_than_controllers_are_not_fenced(redis_address, stored):
    stored.zadd(CPU.workers, {"w": 1})

    async def steps(first: LeaderLock) -> None:
        assert await first.fence(["cpu"], 5)
        cluster_state = ClusterState(redis_address, KEYS)
        assert await cluster_state.order("cpu", "w", order(0))
        assert not await cluster_state.order("cpu", "gone", order(0))
        await cluster_state.close()
        assert [one.token for one in await first.waiting_orders("cpu", "w")] == [0]
        assert stored.get(CPU.fence) == b"5"

    with_locks(redis_address, steps, "first")


def test_everybody_can_see_who_leads(redis_address, stored):
    async def steps(first: LeaderLock) -> None:
        cluster_state = ClusterState(redis_address, KEYS)
        assert await cluster_state.leader() is None
        token = (await first.acquire()).token
        assert await cluster_state.leader() == Leader("first", token)
        stored.set(KEYS.leader, "of another release")
        assert await cluster_state.leader() is None
        await cluster_state.close()

    with_locks(redis_address, steps, "first")


def test_a_server_that_is_not_there_is_a_failure(tmp_path):
    async def steps(lock: LeaderLock) -> None:
        for call in (lock.acquire(), lock.release(1), lock.fence(["cpu"], 1), lock.waiting_orders("cpu", "w")):
            with pytest.raises(Failure) as caught:
                await call
            assert caught.value.code is Code.UNAVAILABLE

    with_locks(RedisAddress.unix(str(tmp_path / "none")), steps, "first")


def test_scripts_leave_nothing_but_their_keys(redis_address, stored):
    stored.zadd(CPU.workers, {"w": 1})

    async def steps(first: LeaderLock) -> None:
        token = (await first.acquire()).token
        await first.order("cpu", "w", order(token))
        await first.release(token)

    with_locks(redis_address, steps, "first")
    assert set(stored.keys("*")) == {KEYS.leader_token, CPU.fence, CPU.orders("w"), CPU.workers}
