"""Requests of a version that several pools serve: which lane takes them, and what happens when its workers are gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from millstream.gateway.placement.decision import PassedOn
from millstream.gateway.placement.demands import ColdLane, ColdRequest
from millstream.gateway.scheduling.completion import SUSPECT
from millstream.gateway.scheduling.quarantine import DIED
from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.model.manifest import ModelConfig, QueuePolicy
from tests.kit.pool_lanes import PoolLanes
from tests.kit.responders import Discard

FAST, SLOW = {1: 0.01, 8: 0.02}, {1: 0.1, 8: 0.4}


class Told(Discard):
    """Counts answers, and keeps failures."""

    def __init__(self) -> None:
        self.answered = 0
        self.failed: list[Failure] = []

    def answer(self, requests: Sequence[Request], outputs: object) -> None:
        self.answered += len(requests)

    def answer_one(self, request: Request, reply: object) -> None:
        self.answered += 1

    def fail(self, request: Request, failure: Failure) -> None:
        self.failed.append(failure)


@pytest.fixture
def pools(tmp_path: Path) -> PoolLanes:
    pools = PoolLanes(tmp_path, {"fast": FAST, "slow": SLOW}, rows_waiting_max=8)
    pools.has("fast", 1)
    pools.has("slow", 1)
    return pools


def overflowed(pools: PoolLanes, pool: str) -> float:
    return pools.bench.tally.counter(catalogue.REQUESTS_OVERFLOWED, "m", "1", pool).value


def refused(pools: PoolLanes, reason: str) -> float:
    return pools.bench.tally.counter(catalogue.REQUESTS_REFUSED, reason).value


def test_the_preferred_pool_takes_requests_while_it_can(pools: PoolLanes) -> None:
    request = pools.add()
    pools.turn()
    assert request.lane is pools.lanes["fast"]
    assert (pools.in_flight("fast"), pools.in_flight("slow")) == ([1], [])


def test_a_full_lane_overflows_to_the_next_and_the_refusal_with_the_shortest_wait_is_reported(pools: PoolLanes) -> None:
    for link in pools.links.values():
        link.up = False  # nothing leaves
    requests = [pools.add() for _ in range(16)]
    assert [pools.waiting(pool) for pool in ("fast", "slow")] == [8, 8]
    assert [request.lane.pool for request in requests] == ["fast"] * 8 + ["slow"] * 8
    assert (overflowed(pools, "fast"), refused(pools, "lane_full")) == (8, 0)
    with pytest.raises(Failure) as both_full:
        pools.add()
    assert both_full.value.code is Code.OVERLOADED
    waits = []
    for lane in pools.lanes.values():
        with pytest.raises(Failure) as full:
            lane.check(pools.bench.request())
        waits.append(full.value.retry_after_s or 0.0)
    assert both_full.value.retry_after_s == min(waits)
    assert refused(pools, "lane_full") == 1  # once, though two lanes refused


def test_a_request_goes_to_the_pool_that_is_predicted_to_answer_in_time(tmp_path: Path) -> None:
    pools = PoolLanes(tmp_path, {"large": SLOW, "small": FAST})
    pools.has("large", 1)
    pools.has("small", 1)
    for _ in range(24):
        pools.add()
        pools.turn()
    assert {batch.lane.pool for batch in pools.bench.pending.values()} == {"large"}
    assert pools.add(timeout_s=0.2).lane.pool == "small"
    assert pools.add(timeout_s=60).lane.pool == "large"


def test_the_next_pool_answers_while_the_preferred_one_loads_and_until_it_is_ready(pools: PoolLanes) -> None:
    pools.has("fast", 0)
    assert pools.add().lane.pool == "slow"
    pools.has("fast", 1)
    assert pools.add().lane.pool == "fast"
    pools.has("fast", 0, failed="it does not fit")
    assert pools.add().lane.pool == "slow"
    pools.has("slow", 0, failed="it does not fit either")
    with pytest.raises(Failure, match="cannot serve: it does not fit"):
        pools.add()


def test_waiting_requests_and_batches_in_flight_move_when_a_pool_loses_its_last_worker(pools: PoolLanes) -> None:
    told = Told()
    requests = [pools.add(responder=told) for _ in range(3)]
    pools.turn()
    requests += [pools.add(responder=told) for _ in range(8)]
    assert pools.in_flight("fast") == [3]
    pools.has("fast", 0)
    pools.turn()
    assert (pools.in_flight("fast"), pools.waiting("fast")) == ([], 0)
    assert {request.lane.pool for request in requests} == {"slow"}
    assert overflowed(pools, "fast") == 11
    pools.answer("fast")  # the dead worker had answered after all: too late
    assert told.answered == 0
    while pools.links["slow"].waiting:
        pools.answer("slow")
    assert (told.answered, told.failed, pools.bench.admission.requests) == (11, [], 0)


def test_batches_in_flight_stay_while_a_worker_drains(pools: PoolLanes) -> None:
    told = Told()
    pools.add(responder=told)
    pools.turn()
    pools.has("fast", 0, held=True)
    assert (pools.in_flight("fast"), pools.in_flight("slow")) == ([1], [])
    pools.answer("fast")
    assert told.answered == 1


def test_without_another_pool_that_can_answer_they_wait(pools: PoolLanes) -> None:
    told = Told()
    pools.has("slow", 0)
    pools.add(responder=told)
    pools.turn()
    pools.add(responder=told)
    pools.has("fast", 0)
    pools.turn()
    assert (pools.in_flight("fast"), pools.waiting("fast")) == ([1], 1)
    pools.has("slow", 1)  # it is loaded at last
    pools.turn()
    assert (pools.in_flight("fast"), pools.waiting("fast"), sum(pools.in_flight("slow"))) == ([], 0, 2)
    while pools.links["slow"].waiting:
        pools.answer("slow")
    assert (told.answered, told.failed) == (2, [])


def test_a_request_that_may_have_killed_a_worker_runs_alone_in_the_next_pool_too(pools: PoolLanes) -> None:
    told = Told()
    for _ in range(2):
        pools.add(responder=told)
    pools.turn()
    [batch] = pools.bench.pending.values()
    pools.bench.lanes.of(batch.lane).recovery.give_up(batch)
    pools.has("fast", 0)
    assert pools.in_flight("slow") == [1, 1]
    assert {batch.attempt for batch in pools.bench.pending.values()} == {SUSPECT}
    batch = next(iter(pools.bench.pending.values()))
    pools.bench.lanes.of(batch.lane).recovery.give_up(batch)
    assert [failure.code for failure in told.failed] == [Code.MODEL]
    pools.answer("slow", 1)
    assert told.answered == 1


def test_an_open_circuit_moves_what_waits_and_its_end_brings_requests_back(pools: PoolLanes) -> None:
    told = Told()
    fast = pools.lanes["fast"]
    pools.links["fast"].up = False
    pools.add(responder=told)
    fast.block(3, 10.0)
    assert (pools.waiting("fast"), pools.waiting("slow"), told.failed) == (0, 1, [])
    assert pools.add().lane.pool == "slow"
    pools.bench.now += 11
    fast.tick(pools.bench.now)
    assert pools.add().lane.pool == "fast"


def test_a_cold_pool_without_workers_is_passed_over(pools: PoolLanes) -> None:
    pools.has("fast", 0)
    pools.has("slow", 0)
    assert pools.add().lane.pool == "fast"
    pools.staffed["fast"] = False
    pools.route.choose()
    assert pools.add().lane.pool == "slow"


def test_requests_that_no_worker_of_a_pool_loads_go_to_the_next(pools: PoolLanes) -> None:
    told = Told()
    pools.has("fast", 0)
    pools.has("slow", 0)
    request = pools.add(responder=told)
    pools.lanes["fast"].refuse_cold(Failure(Code.UNAVAILABLE, "nothing can be unloaded"))
    assert (request.lane.pool, told.failed) == ("slow", [])
    pools.staffed["fast"] = False
    pools.lanes["slow"].refuse_cold(Failure(Code.UNAVAILABLE, "nothing can be unloaded here either"))
    assert [failure.message for failure in told.failed] == ["nothing can be unloaded here either"]


def both_cold(pools: PoolLanes, slow: Failure | None) -> list[str]:
    """Have the preferred pool pass requests on once, and the other one refuse them; return who is asked, as it is."""
    asked: list[str] = []

    def load_for(lane: ColdLane, _request: ColdRequest) -> None:
        asked.append(lane.pool)
        if asked == ["fast"]:
            raise PassedOn("fast", "slow")
        if lane.pool == "slow" and slow is not None:
            raise slow

    pools.has("fast", 0)
    pools.has("slow", 0)
    pools.owner.load = load_for
    return asked


def test_a_version_that_the_preferred_pool_would_unload_others_for_is_loaded_in_the_next(pools: PoolLanes) -> None:
    asked = both_cold(pools, None)
    assert pools.add().lane.pool == "slow"
    assert asked == ["fast", "slow"]


def test_a_request_that_was_passed_on_and_refused_comes_back(pools: PoolLanes) -> None:
    """By its record the next pool had memory free; it has none any more."""
    asked = both_cold(pools, Failure(Code.MEMORY, "all are in use", retry_after_s=1.0))
    assert pools.add().lane.pool == "fast"
    assert asked == ["fast", "slow", "fast"]


def test_a_request_for_which_the_next_pool_loads_too_long_is_told_so_and_loads_nothing_more(pools: PoolLanes) -> None:
    asked = both_cold(pools, Failure(Code.OVERLOADED, "it is loading", retry_after_s=9.0))
    with pytest.raises(Failure, match="it is loading"):
        pools.add()
    assert asked == ["fast", "slow"]


def test_a_request_in_quarantine_is_refused_by_all_pools(pools: PoolLanes) -> None:
    bad = pools.bench.request()
    pools.bench.shared.quarantine.add(pools.bench.lane.content_id, bad, DIED)
    pools.has("fast", 0)
    with pytest.raises(Failure) as quarantined:
        pools.add()
    assert quarantined.value.code is Code.MODEL


def test_limits_of_queue_policies_count_the_waiting_requests_of_all_pools(tmp_path: Path) -> None:
    config = ModelConfig(queue=QueuePolicy(requests_max=2, timeout_ms_default=500, timeout_override=True))
    pools = PoolLanes(tmp_path, {"fast": FAST, "slow": SLOW}, config=config)
    for link in pools.links.values():
        link.up = False
    pools.has("fast", 1)
    first = pools.add(timeout_s=0.2)
    assert first.wait_until == pytest.approx(0.2)
    pools.has("slow", 1)
    pools.has("fast", 0)
    assert first.lane.pool == "slow"
    assert first.deadline == pytest.approx(0.2)
    pools.add()
    with pytest.raises(Failure, match="Exceeds maximum queue size"):
        pools.add()
    told = Told()
    first.responder = told
    pools.bench.now = 0.3
    pools.lanes["slow"].tick(pools.bench.now)
    assert [failure.message for failure in told.failed] == ["Request timeout expired"]


def test_a_cancelled_request_leaves_the_lane_that_it_moved_to(pools: PoolLanes) -> None:
    pools.links["fast"].up = pools.links["slow"].up = False
    request = pools.add()
    pools.has("fast", 0)
    request.lane.cancel(request)
    assert (request.lane.pool, pools.waiting("slow"), pools.bench.admission.requests) == ("slow", 0, 0)


def test_protocols_are_counted_once(pools: PoolLanes) -> None:
    pools.links["fast"].up = pools.links["slow"].up = False
    for _ in range(16):
        pools.add()
    with pytest.raises(Failure) as full:
        pools.add()
    pools.route.lane.record_rejection(RequestProtocol.V2, full.value.code)
    counted = pools.bench.tally.counter(catalogue.REQUESTS, "m", "1", "v2", "overloaded").value
    assert counted == 1
