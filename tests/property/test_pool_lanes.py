"""A version in three pools whose workers come, fail, drain and die: each request is answered once.

Rules are what callers, workers and time do. Replies also come from pools that lost their workers: too late.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from millstream.gateway.scheduling.completion import ABANDON_S
from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import ModelConfig
from tests.kit.lane_harness import REST_S
from tests.kit.pool_lanes import PoolLanes
from tests.kit.responders import Discard
from tests.kit.state_machines import machine_settings

PERMITS = 40
ROWS_WAITING_MAX = 12
POOLS = {"gpu": {1: 0.001, 8: 0.002}, "cpu": {1: 0.005, 4: 0.015}, "edge": {1: 0.2}}
NAMES = st.sampled_from(sorted(POOLS))
#: of the second one, requests with more than 3 rows run in parts
CONFIGS = [None, ModelConfig(priority_levels=2, priority_default=1, rows_max=3), ModelConfig(rows_max=3)]


class Callers(Discard):
    """How often each request was answered."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()

    def answer(self, requests: Sequence[Request], outputs: object) -> None:
        self.answers.update(map(id, requests))

    def answer_one(self, request: Request, reply: object) -> None:
        self.answers[id(request)] += 1

    def fail(self, request: Request, failure: Failure) -> None:
        self.answers[id(request)] += 1


class PoolMachine(RuleBasedStateMachine):
    """`admitted`: all requests that a lane took."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(config=st.sampled_from(CONFIGS), ready=st.sets(NAMES))
    def begin(self, config: ModelConfig | None, ready: set[str]) -> None:
        folder = Path(self.folder.name)
        self.pools = PoolLanes(folder, POOLS, permits=PERMITS, rows_waiting_max=ROWS_WAITING_MAX, config=config)
        self.callers = Callers()
        self.admitted: list[Request] = []
        self.cancelled: set[int] = set()
        for pool in ready:
            self.pools.has(pool, 1)

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self.admitted if not request.done]

    # Callers.

    @rule(
        rows=st.integers(1, 5) | st.integers(6, 30),
        timeout_s=st.sampled_from([0.05, 1.0, 60.0]),
        priority=st.integers(0, 2),
        turns=st.booleans(),
        times=st.sampled_from([1, 1, 8]),
    )
    def ask(self, rows: int, timeout_s: float, priority: int, turns: bool, times: int) -> None:
        for _ in range(times):
            request = self.pools.bench.request(rows, timeout_s, priority, self.callers)
            able = [lane for lane in self.pools.lanes.values() if lane.can_serve]
            idle = any(lane.idle for lane in able) and self.pools.bench.admission.requests < PERMITS
            try:
                self.pools.route.lane.add(request, 16 * rows)
            except Failure as failure:
                assert failure.code in {Code.OVERLOADED, Code.UNAVAILABLE, Code.MODEL}
                assert not idle or failure.code is Code.MODEL, "a pool that is idle takes what others refuse"
            else:
                self.admitted.append(request)
                taken_by = self.pools.lanes[request.lane.pool]
                assert not idle or taken_by.can_serve, "a lane that can answer comes before one that cannot"
        if turns:
            self.pools.turn()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.cancelled.add(id(request))
        request.lane.cancel(request)

    # Workers.

    @rule(pool=NAMES, instances=st.integers(0, 2), held=st.booleans(), failed=st.sampled_from([None, None, "broken"]))
    def place(self, pool: str, instances: int, held: bool, failed: str | None) -> None:
        self.pools.has(pool, instances if failed is None else 0, failed=failed, held=held or instances > 0)

    @rule(pool=NAMES)
    def all_workers_die(self, pool: str) -> None:
        self.pools.staffed[pool] = False
        self.pools.has(pool, 0, held=False)
        if any(lane.can_serve for lane in self.pools.lanes.values()):
            assert self.pools.waiting(pool) == 0
            assert not [n for n in self.pools.in_flight(pool) if n], "nothing is left in a dead pool"

    @rule(pool=NAMES)
    def a_worker_starts(self, pool: str) -> None:
        self.pools.staffed[pool] = True
        self.pools.route.choose()

    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        replies = [(pool, at) for pool, link in self.pools.links.items() for at in range(len(link.waiting))]
        if replies:
            self.pools.answer(*data.draw(st.sampled_from(replies)))

    @precondition(lambda self: self.pools.bench.pending)
    @rule(data=st.data())
    def a_batch_dies_with_its_worker(self, data: st.DataObject) -> None:
        pending = self.pools.bench.pending
        batch = pending[data.draw(st.sampled_from(sorted(pending)))]
        self.pools.bench.lanes.of(batch.lane).recovery.give_up(batch)

    @rule(pool=NAMES, seconds=st.sampled_from([0.01, 5.0]))
    def a_circuit_opens(self, pool: str, seconds: float) -> None:
        self.pools.lanes[pool].block(3, seconds)

    @rule(seconds=st.sampled_from([0.0001, 0.01, 0.1, 2.0, 80.0]))
    def time_passes(self, seconds: float) -> None:
        bench = self.pools.bench
        bench.now += seconds
        for batch in list(bench.pending.values()):
            if batch.earliest <= bench.now:
                self.pools.bench.lanes.of(batch.lane).recovery.expire(batch, bench.now)
        for lane in (*self.pools.lanes.values(),) * 2:  # a circuit that closes may move requests to a lane before it
            lane.tick(bench.now)
        assert not [one for one in self.waiting if one.deadline <= bench.now], "requests that are late are told so"

    @rule()
    def turn(self) -> None:
        self.pools.turn()

    # What holds at any time.

    @invariant()
    def the_first_pool_that_can_answer_is_tried_first(self) -> None:
        able = [lane for lane in self.pools.lanes.values() if lane.can_serve]
        loads = [lane for lane in self.pools.lanes.values() if lane.loadable]
        assert not able or self.pools.route.lane is able[0]
        assert able or not loads or self.pools.route.lane is loads[0]

    @invariant()
    def no_request_waits_where_it_cannot_be_answered(self) -> None:
        if any(lane.can_serve for lane in self.pools.lanes.values()):
            stuck = [
                pool for pool, lane in self.pools.lanes.items() if lane.waiting and not lane.can_serve and lane.refuses
            ]
            assert not stuck

    @invariant()
    def each_is_answered_once(self) -> None:
        for request in self.admitted:
            expected = int(request.done and id(request) not in self.cancelled)
            assert self.callers.answers[id(request)] == expected

    @invariant()
    def permits_are_those_of_the_waiting(self) -> None:
        admission = self.pools.bench.admission
        assert admission.requests == len(self.waiting)
        assert admission.bytes == sum(request.permit_bytes for request in self.waiting)

    @invariant()
    def each_lane_counts_its_own(self) -> None:
        for pool, lane in self.pools.lanes.items():
            assert lane.state.in_flight == len(self.pools.in_flight(pool))

    def teardown(self) -> None:
        """Time passes: no request is left waiting, and nothing is kept."""
        if not hasattr(self, "pools"):
            return
        self.time_passes(80.0 + ABANDON_S)
        self.time_passes(REST_S)
        assert not self.waiting
        assert not self.pools.bench.pending
        assert all(lane.idle and not lane.splits.open for lane in self.pools.lanes.values())
        self.permits_are_those_of_the_waiting()
        self.each_is_answered_once()
        self.folder.cleanup()


@pytest.mark.state_machine
def test_each_request_is_answered_once_by_a_pool_that_can() -> None:
    run(
        PoolMachine,
        settings=machine_settings(
            max_examples=60,
            stateful_step_count=30,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
