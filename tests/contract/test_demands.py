"""Orders to load a version as gateways and workers give and end them, on every installed Redis server."""

from __future__ import annotations

import asyncio

from millstream.services.queue.producer_link import ProducerLink
from tests.kit.pool import LEASE_MS, Pool


def _alive(pool: Pool, *workers: str) -> None:
    for worker in workers:
        pool.worker(worker).beat(b"{}", LEASE_MS)


def test_the_best_worker_that_is_alive_is_ordered_once(pool):
    _alive(pool, "w1", "w2")
    assert pool.demand("m", "dead", "w1", "w2", order=b"load m") == ("w1", True)
    assert pool.demand("m", "w2", "w1", order=b"load m") == ("w1", False)  # another gateway prefers another worker
    assert (pool.orders("dead"), pool.orders("w1"), pool.orders("w2")) == ([], [b"load m"], [])
    assert 3500 < pool.redis.ttl(pool.keys.demands) <= 3600


def test_nothing_is_ordered_if_a_worker_serves_the_version_or_none_is_alive(pool):
    assert pool.demand("m", "w1") == ("", False)
    pool.join("w1", "m")
    assert pool.demand("m", "w1") == ("", False)
    assert pool.orders("w1") == []
    assert not pool.redis.exists(pool.keys.demands)


def test_another_worker_is_ordered_after_the_first_ended_the_demand(pool):
    _alive(pool, "w1", "w2")
    pool.demand("m", "w1", "w2")
    assert not pool.end_demand("m", "w2")  # it is not its own
    assert pool.demand("m", "w2") == ("w1", False)
    assert pool.end_demand("m", "w1")
    assert not pool.end_demand("m", "w1")
    assert pool.demand("m", "w2") == ("w2", True)
    assert pool.end_demand("m", "w2")
    assert not pool.redis.exists(pool.keys.demands)


def test_another_worker_is_ordered_after_the_life_of_a_demand(pool):
    _alive(pool, "w1", "w2")
    assert pool.demand("m", "w1", life_ms=0) == ("w1", True)
    pool.next_millisecond()
    assert pool.demand("m", "w2", "w1") == ("w2", True)
    assert not pool.end_demand("m", "w1")  # it ended the load later: the demand is the other's now


def test_the_ordered_worker_is_told_again_once_those_that_wait_now_wait_for_much_longer(pool):
    _alive(pool, "w1", "w2")
    assert pool.demand("m", "w1", life_ms=20_000, order=b"first") == ("w1", True)
    assert pool.demand("m", "w2", "w1", life_ms=30_000, order=b"second") == ("w1", False)
    assert pool.orders("w1") == [b"first"]
    assert pool.demand("m", "w2", "w1", life_ms=60_000, order=b"third") == ("w1", False)
    assert pool.demand("m", "w2", "w1", life_ms=60_000, order=b"fourth") == ("w1", False)
    assert (pool.orders("w1"), pool.orders("w2")) == ([b"third"], [])


def test_a_demand_lasts_no_longer_if_the_clock_is_set_back(pool):
    _alive(pool, "w1", "w2")
    assert pool.demand("m", "w1", life_ms=3_600_000) == ("w1", True)  # as if the clock was an hour ahead
    assert pool.demand("m", "w2", life_ms=60_000) == ("w2", True)
    assert pool.demand("m", "w1", life_ms=60_000) == ("w2", False)


def test_a_worker_that_is_reclaimed_leaves_no_demand_and_no_order(pool):
    _alive(pool, "w1", "w2")
    pool.demand("m", "w1")
    pool.demand("n", "w2")
    assert pool.reclaim("w1")[0] == 1
    assert not pool.redis.exists(pool.keys.orders("w1"))
    assert pool.demand("m", "w1", "w2") == ("w2", True)
    assert pool.demand("n", "w2") == ("w2", False)


def test_a_silent_worker_is_passed_over_when_it_is_reclaimed(pool):
    _alive(pool, "w1", "w2")
    assert pool.demand("m", "w1", "w2") == ("w1", True)
    pool.silence("w1")
    pool.reclaim()
    assert pool.demand("m", "w1", "w2") == ("w2", True)


def test_a_redis_that_lost_its_data_takes_the_demand_again(pool):
    _alive(pool, "w1")
    pool.demand("m", "w1")
    pool.clear()
    _alive(pool, "w1")
    assert pool.demand("m", "w1") == ("w1", True)


def test_two_gateways_that_ask_at_once_order_one_worker(pool):
    _alive(pool, "w1", "w2")

    async def demand_from_two_gateways() -> set[tuple[str, bool]]:
        links = [
            ProducerLink(pool.address, pool.keys, gateway, lambda _: None, lambda _: None, lambda *_: None)
            for gateway in ("g0", "g1")
        ]
        for link in links:
            await link.start()
        pool.redis.script_flush()  # the link loads it again
        try:
            asked = [
                link.demand("m", 60_000, b"load", order)
                for link, order in zip(links, (["w1", "w2"], ["w2", "w1"]), strict=True)
                for _ in range(50)
            ]
            answers = await asyncio.gather(*asked)
        finally:
            for link in links:
                await link.stop()
        assert sum(now for _, now in answers) == 1
        return {(worker, False) for worker, _ in answers}

    assert len(asyncio.run(demand_from_two_gateways())) == 1
    assert len(pool.orders("w1") + pool.orders("w2")) == 1
    pool.load()
