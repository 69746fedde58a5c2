"""Lanes and admission under everything that happens to them: each request is answered once, and every permit comes
back.

Two lanes of one pool share a link and the permits. Requests with more than ROWS_OF_A_RUN rows run in parts. Rules are
what callers, workers, Redis, time and operators do.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millstream.gateway.scheduling.batching.dispatch import DEPTH
from millstream.gateway.scheduling.completion import ABANDON_S
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Code, Failure
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.profile import Profile
from millstream.services.wire.batch import decode_batch
from tests.kit.lane_harness import REST_S, LaneBench
from tests.kit.state_machines import machine_settings

PERMITS = 12
ROWS_WAITING_MAX = 16
ROWS_MAX = 8
ROWS_OF_A_RUN = 6
CONFIG = ModelConfig(rows_max=ROWS_OF_A_RUN)
PROFILES = st.sampled_from([{1: 0.0001, 8: 0.0004}, {1: 0.005, 4: 0.015}, {1: 0.2}])
LANES = st.integers(0, 1)
REFUSALS = {Code.OVERLOADED, Code.UNAVAILABLE, Code.MODEL}


class Callers:
    """How often each request was answered, and how."""

    protocol = RequestProtocol.V2

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()
        self.failures: dict[int, Code] = {}

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        self.answers.update(map(id, requests))

    def answer_one(self, request: Request, reply: Reply) -> None:
        self.answers[id(request)] += 1

    def fail(self, request: Request, failure: Failure) -> None:
        self.answers[id(request)] += 1
        self.failures[id(request)] = failure.code


class LaneMachine(RuleBasedStateMachine):
    """`admitted`: all requests that ever got a permit, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(first=PROFILES, second=PROFILES, instances=st.integers(0, 2), early=st.booleans())
    def begin(self, first: dict[int, float], second: dict[int, float], instances: int, early: bool) -> None:
        self.bench = LaneBench(
            Path(self.folder.name),
            first,
            instances,
            permits=PERMITS,
            rows_waiting_max=ROWS_WAITING_MAX,
            early=early,
            config=CONFIG,
        )
        self.lanes = [self.bench.lane, self.bench.another("n", second, instances, CONFIG)]
        self.instances = [instances, instances]
        self.callers = Callers()
        self.admitted: list[Request] = []
        self.cancelled: set[int] = set()
        self.open = [True, True]
        self.lane_of: dict[int, Lane] = {}
        self.seen: set[str] = set()  # batches that left

    # Callers.

    @rule(
        at=LANES,
        rows=st.integers(1, 9) | st.integers(10, 40),
        timeout_s=st.sampled_from([0.001, 0.05, 1.0, 60.0]),
        priority=st.integers(0, 3),
        turns=st.booleans(),
    )
    def ask(self, at: int, rows: int, timeout_s: float, priority: int, turns: bool) -> None:
        lane, admission = self.lanes[at], self.bench.admission
        if not self.open[at]:
            return
        request = self.bench.request(rows, timeout_s, priority, self.callers)
        idle, full = lane.idle, admission.requests >= PERMITS or admission.closed
        waiting = lane.rows_waiting - lane.splits.rows
        entering = lane.policy.batch_rows if rows > ROWS_OF_A_RUN else rows
        crowded = bool(waiting) and waiting + entering > ROWS_WAITING_MAX
        try:
            lane.add(request, 16 * rows)
        except Failure as failure:
            assert failure.code in REFUSALS
            assert failure.retry_after_s is not None or failure.code is Code.MODEL
            assert not idle or full or failure.code is Code.MODEL, "an idle lane refuses no request"
        else:
            assert not full and not crowded
            self.admitted.append(request)
            self.lane_of[id(request)] = lane
        if turns:
            self.bench.turn()

    @precondition(lambda self: self._waiting())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self._waiting()))
        self.cancelled.add(id(request))
        self.lane_of[id(request)].cancel(request)

    def _waiting(self) -> list[Request]:
        return [request for request in self.admitted if not request.done]

    # Workers.

    @precondition(lambda self: self.bench.link.waiting)
    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.bench.link.waiting) - 1))
        header, _ = decode_batch(self.bench.link.waiting[at][0])
        failed = data.draw(st.sets(st.integers(0, len(header.rows) - 1)))
        self.bench.answer(at, {i: [Code.MODEL.value, "no"] for i in failed})

    @precondition(lambda self: self.bench.pending)
    @rule(data=st.data(), what=st.sampled_from(["put again", "give up", "refuse"]))
    def lose(self, data: st.DataObject, what: str) -> None:
        batch = self.bench.pending[data.draw(st.sampled_from(sorted(self.bench.pending)))]
        if what == "put again":
            self.bench.lanes.of(batch.lane).recovery.put_again(batch)
        elif what == "give up":
            self.bench.lanes.of(batch.lane).recovery.give_up(batch)
        else:
            self.bench.lanes.of(batch.lane).recovery.refuse(batch, "no room")

    @rule(at=LANES, instances=st.integers(0, 2), profile=PROFILES)
    def place(self, at: int, instances: int, profile: dict[int, float]) -> None:
        self.instances[at] = instances
        self.lanes[at].update_instances(instances, Profile(profile), max(profile), same_host=False, failed=None)

    @precondition(lambda self: 0 in self.instances)
    @rule(at=LANES)
    def refuse_the_load(self, at: int) -> None:
        if not self.instances[at]:
            self.lanes[at].refuse_cold(Failure(Code.UNAVAILABLE, "no room", retry_after_s=1))

    # Redis, time, operators.

    @rule()
    def redis_goes_or_comes(self) -> None:
        self.bench.link.up = not self.bench.link.up
        if self.bench.link.up:
            for batch in list(self.bench.pending.values()):
                self.bench.lanes.of(batch.lane).recovery.put_again(batch)
            for lane in self.lanes:
                lane.dispatcher.dispatch()

    @rule(seconds=st.sampled_from([0.0001, 0.01, 0.1, 2.0, 80.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now += seconds
        for batch in list(self.bench.pending.values()):
            if batch.earliest <= self.bench.now:
                self.bench.lanes.of(batch.lane).recovery.expire(batch, self.bench.now)
        for lane in self.lanes:
            lane.tick(self.bench.now)
        late = [request for request in self._waiting() if request.deadline <= self.bench.now]
        assert not late, "who waits longer than the deadline is told so"

    @rule()
    def turn(self) -> None:
        self.bench.turn()

    @precondition(lambda self: all(self.open))
    @rule(at=LANES)
    def close(self, at: int) -> None:
        self.open[at] = False
        self.lanes[at].close()
        assert not self.lanes[at].waiting

    # What holds at any time.

    @invariant()
    def permits_are_those_of_who_waits(self) -> None:
        waiting = self._waiting()
        admission = self.bench.admission
        assert admission.requests == len(waiting)
        assert admission.bytes == sum(request.permit_bytes for request in waiting)
        assert all(16 * one.rows <= one.permit_bytes <= (16 + 8) * one.rows for one in waiting)

    @invariant()
    def each_is_answered_once(self) -> None:
        for request in self.admitted:
            expected = int(request.done and id(request) not in self.cancelled)
            assert self.callers.answers[id(request)] == expected

    @invariant()
    def no_work_waits_for_an_idle_worker(self) -> None:
        if not self.bench.link.up:
            return
        for lane, instances in zip(self.lanes, self.instances, strict=True):
            out = sum(batch.lane is lane.state for batch in self.bench.pending.values())
            if lane.waiting and out < instances:
                assert lane.dispatcher.scheduled, "it leaves in the next turn of the event loop"

    @invariant()
    def what_left_was_worth_running(self) -> None:
        for name, batch in self.bench.pending.items():
            if name not in self.seen:
                requests = batch.requests
                assert sum(request.rows for request in requests) <= ROWS_MAX or len(requests) == 1
                assert all(request.taken for request in requests)
                # A part whose successor is late at once leaves, and ends with it.
                assert all(request.part or not request.done for request in requests)
                assert all(request.deadline > self.bench.now for request in requests)
        self.seen.update(self.bench.pending)

    @invariant()
    def no_more_is_out_than_there_are_slots(self) -> None:
        for lane, is_open in zip(self.lanes, self.open, strict=True):
            out = [batch for batch in self.bench.pending.values() if batch.lane is lane.state]
            assert lane.state.in_flight == len(out)
            first = [batch for batch in out if batch.attempt == 1]
            assert len(first) <= 2 * (DEPTH + 1) or not is_open  # a lane that closes sends all that waits

    def teardown(self) -> None:
        """Redis comes back, workers answer or time passes: no request is left waiting, and nothing is kept."""
        if not hasattr(self, "bench"):
            return
        if not self.bench.link.up:
            self.redis_goes_or_comes()
        self.time_passes(80.0 + ABANDON_S)
        self.time_passes(REST_S)
        assert not self._waiting()
        assert not self.bench.pending
        assert all(lane.idle and not lane.splits.open for lane in self.lanes)
        assert (self.bench.admission.requests, self.bench.admission.bytes) == (0, 0)
        self.each_is_answered_once()
        self.folder.cleanup()


@pytest.mark.state_machine
def test_each_request_is_answered_once_whatever_happens():
    run_state_machine_as_test(
        LaneMachine,
        settings=machine_settings(
            max_examples=100,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
