"""A worker stops serving a lane only if no batch waits or runs in it, and enough other workers serve it."""

from __future__ import annotations

import pytest

from tests.kit.pool import Pool, names


def test_an_idle_lane_is_released_and_its_stream_is_gone(pool: Pool) -> None:
    worker = pool.join("w1", "a", "b")
    assert worker.release_lane("a", 0)
    snapshot = pool.check()
    assert snapshot.lanes["w1"] == {"b"}
    assert "a" not in snapshot.streams


@pytest.mark.parametrize("leased", [False, True])
def test_a_lane_with_a_batch_is_not_released(pool: Pool, leased: bool) -> None:
    worker = pool.join("w1", "a")
    pool.put("a", "b1")
    leases = pool.next("w1") if leased else []
    assert not worker.release_lane("a", 0)
    assert pool.check().lanes["w1"] == {"a"}
    pool.next("w1", *(leases or pool.next("w1")))
    assert worker.release_lane("a", 0)


def test_a_batch_that_comes_after_the_release_waits_for_another_load(pool: Pool) -> None:
    worker = pool.join("w1", "a", "b")
    assert pool.wait("w1", timeout_s=0.01) == []  # it is idle
    assert worker.release_lane("a", 0)
    assert pool.put("a", "b1") == 0, "the idle worker does not get it"
    assert pool.check().waiting("a") == ["b1"]
    pool.join("w2", "a")
    assert names(pool.next("w2")) == ["b1"]


def test_a_lane_stays_while_too_few_others_serve_it(pool: Pool) -> None:
    worker = pool.join("w1", "a")
    assert not worker.release_lane("a", 1)
    pool.join("w2", "a")
    assert not worker.release_lane("a", 2)
    assert worker.release_lane("a", 1)
    assert pool.check().lanes == {"w2": {"a"}}


def test_lanes_in_use_and_their_workers_are_counted(pool: Pool) -> None:
    worker = pool.join("w1", "a", "b", "c")
    pool.join("w2", "b")
    pool.put("c", "b1")
    assert worker.lanes_in_use(["a", "b", "x"], ["a", "b", "c"]) == ({"a": 1, "b": 2, "x": 0}, {"c"})
    assert worker.lanes_in_use([], []) == ({}, set())


def test_a_lane_that_is_added_ends_its_demand(pool: Pool) -> None:
    worker = pool.join("w1", "a")
    assert worker.demand("b", 1000, b"{}")
    assert worker.demand("c", 1000, b"{}")
    assert worker.take_order(1) == worker.take_order(1) == b"{}"
    worker.add_lanes(["b"])
    worker.end_demand("c")
    assert not pool.redis.exists(pool.keys.demands)
    assert worker.take_order(0.01) is None
