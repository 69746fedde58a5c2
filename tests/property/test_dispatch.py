"""The dispatch policy's decisions, over any profile, queue, number of batches in flight and time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import assume, given
from hypothesis import strategies as st

from millstream.gateway.scheduling.batching.batcher import Batcher
from millstream.gateway.scheduling.batching.dispatch import (
    DEPTH,
    EXPIRE,
    HOLD,
    TURN_RUNS,
    TURN_S,
    UNTRIED_MARGIN,
    DispatchPolicy,
)
from millstream.gateway.scheduling.request import Request
from millstream.services.model.manifest import ModelConfig, QueuePolicy
from millstream.services.model.profile import Profile
from tests.kit.responders import DISCARD

ROWS_MAX = 16
NOW = 100.0
ROUNDING_S = 1e-9

PROFILES = st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), st.floats(0.00001, 0.5), max_size=4).map(Profile)
PREFERRED = st.lists(st.integers(1, ROWS_MAX), max_size=3, unique=True)
DELAYS_MS = st.sampled_from([0.0, 5.0, 500.0])
NO_QUEUE_POLICY = QueuePolicy()
AGES_S = st.floats(0, 1)
LEFT_S = st.floats(0.001, 10)
ROWS = st.integers(1, ROWS_MAX)
#: age of a request, seconds left to its deadline, rows
WAITING = st.lists(st.tuples(AGES_S, LEFT_S, ROWS), min_size=1, max_size=20)
ANY_WAITING = st.one_of(
    WAITING, st.tuples(WAITING, st.tuples(AGES_S, st.just(-0.1), ROWS)).map(lambda w: [*w[0], w[1]])
)


@dataclass
class Case:
    """A policy with `in_flight` batches in flight, and what waits."""

    policy: DispatchPolicy
    waiting: Batcher
    profile: Profile
    in_flight: int
    preferred: tuple[int, ...]
    delay_s: float

    def decide(self) -> int:
        return self.policy.rows_to_take(self.waiting, self.in_flight, NOW)

    def send(self, rows: int) -> None:
        """Put a batch, as the lane does."""
        taken = sum(request.rows for request in self.waiting.take(NOW, rows))
        self.policy.record_put(taken, self.policy.run_s(taken), NOW)
        self.in_flight += 1


@st.composite
def cases(draw: st.DrawFn, preferred=PREFERRED, delay_ms=DELAYS_MS, queue=NO_QUEUE_POLICY, waits=ANY_WAITING):
    profile, sizes = draw(PROFILES), sorted(draw(preferred))
    config = ModelConfig(rows_max=ROWS_MAX, rows_preferred=tuple(sizes), queue_delay_ms_max=draw(delay_ms), queue=queue)
    policy = DispatchPolicy(config, ROWS_MAX, batching=True)
    instances = draw(st.integers(1, 3))
    policy.update(instances, profile, draw(st.integers(1, ROWS_MAX)), batching_off=draw(st.booleans()))
    if draw(st.booleans()):
        policy.share_pool(True)
    in_flight = draw(st.integers(0, policy.credits - 1))
    for _ in range(in_flight):
        rows = draw(st.integers(1, policy.batch_rows))
        policy.record_put(rows, policy.run_s(rows), NOW)
    waiting = Batcher()
    for age_s, left_s, rows in draw(waits):
        request = Request((), rows, 0, NOW - age_s, NOW + left_s, DISCARD)
        request.answer_by = request.deadline
        waiting.add(request, None)
    return Case(policy, waiting, profile, in_flight, tuple(sizes), config.queue_delay_ms_max / 1000)


@given(cases())
def test_a_decision_is_hold_expire_or_rows_within_the_batch(case):
    assert case.decide() in {HOLD, EXPIRE, *range(1, case.policy.batch_rows + 1)}


@given(cases())
def test_the_same_input_gives_the_same_decision(case):
    assert case.decide() == case.decide()


@given(cases(delay_ms=st.just(0.0)))
def test_without_a_queue_delay_no_request_waits_for_an_idle_instance(case):
    assume(case.in_flight < case.policy.instances)
    assert case.decide() != HOLD


@given(cases())
def test_a_queue_delay_ends(case):
    assume(case.in_flight < case.policy.instances)
    if NOW - case.waiting.oldest_arrival() >= case.delay_s:
        assert case.decide() != HOLD


@given(cases())
def test_an_idle_lane_expires_only_requests_whose_deadline_passed(case):
    assume(case.in_flight == 0)
    assert (case.decide() == EXPIRE) == (case.waiting.earliest().deadline <= NOW)


@given(cases(queue=QueuePolicy(requests_max=100)))
def test_under_a_queue_policy_only_the_end_of_the_wait_expires_a_request(case):
    assert (case.decide() == EXPIRE) == (case.waiting.earliest().deadline <= NOW)


@given(cases(preferred=st.just([])))
def test_a_batch_of_several_rows_ends_before_the_earliest_deadline(case):
    rows, first = case.decide(), case.waiting.earliest()
    if rows > 1:
        start = max(case.policy.estimator.free_at, NOW)
        assert start + case.policy.estimator.run_s(rows) <= first.deadline + ROUNDING_S


@given(run_s=st.floats(0.0001, 2), left_s=st.floats(0.01, 60), efficient=ROWS, others=st.booleans())
def test_far_more_rows_than_ever_ran_are_tried_alone_and_with_time_to_spare(run_s, left_s, efficient, others):
    policy, waiting = DispatchPolicy(ModelConfig(rows_max=ROWS_MAX), ROWS_MAX, batching=True), Batcher()
    policy.update(1, Profile({1: run_s}), efficient, batching_off=False)
    policy.share_pool(others)
    for _ in range(ROWS_MAX):
        waiting.add(Request((), 1, 0, NOW, NOW + left_s, DISCARD), None)
    rows = policy.rows_to_take(waiting, 0, NOW)
    if rows > 2:
        assert UNTRIED_MARGIN * policy.run_s(rows) <= left_s + ROUNDING_S
        assert not others or policy.run_s(rows) <= TURN_S + ROUNDING_S
    elif efficient > 2 and not others:
        assert UNTRIED_MARGIN * policy.run_s(3) > left_s, "nothing else keeps what waits from running together"


@given(cases(preferred=st.just([]), delay_ms=st.just(0.0), waits=st.just([(0.0, 1000.0, 1)] * ROWS_MAX)))
def test_with_time_left_an_idle_lane_runs_as_many_rows_together_as_it_may(case):
    assume(case.in_flight == 0)
    assert case.decide() == case.policy.batch_rows


@given(cases())
def test_a_batch_has_a_preferred_size_where_one_fits_and_the_delay_has_not_passed(case):
    rows = case.decide()
    delayed = bool(case.delay_s) and NOW - case.waiting.oldest_arrival() >= case.delay_s
    if rows not in (HOLD, EXPIRE) and not delayed and rows not in case.preferred:
        sums = [together for together in case.waiting.sums(NOW, rows) if together <= rows]  # a larger one is sent alone
        assert not {*case.preferred} & {*sums}


@given(cases(), st.integers(1, ROWS_MAX))
def test_the_sums_of_waiting_rows_are_those_of_the_batches_that_can_be_taken(case, rows_max):
    sums = case.waiting.sums(NOW, rows_max)
    taken = case.waiting.take(NOW, rows_max)
    assert sums == list(itertools.accumulate(request.rows for request in taken))


@given(cases(delay_ms=st.just(500.0), waits=st.just([(0.5, 1000.0, 1)] * ROWS_MAX)))
def test_after_the_queue_delay_preferred_sizes_hold_no_request_back(case):
    assume(case.in_flight == 0)
    assert case.decide() == case.policy.batch_rows


@given(cases())
def test_credits_are_two_or_three_for_each_instance(case):
    assert case.policy.credits in (DEPTH * case.policy.instances, (DEPTH + 1) * case.policy.instances)


@given(PROFILES, st.integers(1, ROWS_MAX), st.booleans())
def test_where_batching_is_off_each_request_runs_alone(profile, rows_efficient, others_active):
    policy = DispatchPolicy(ModelConfig(rows_max=ROWS_MAX), ROWS_MAX, batching=True)
    policy.update(1, profile, rows_efficient, batching_off=True)
    policy.share_pool(others_active)
    assert policy.batch_rows == 1


@given(PROFILES, st.integers(1, ROWS_MAX))
def test_measured_runs_are_short_while_other_lanes_are_in_use(profile, rows_efficient):
    policy = DispatchPolicy(ModelConfig(rows_max=ROWS_MAX), ROWS_MAX, batching=True)
    policy.update(1, profile, rows_efficient, batching_off=False)
    alone = policy.batch_rows
    policy.share_pool(True)
    assert policy.batch_rows <= alone
    if alone <= profile.largest and policy.batch_rows > 1:
        assert profile.predict(policy.batch_rows) <= max(TURN_S, TURN_RUNS * profile.predict(1)) + ROUNDING_S
    policy.share_pool(False)
    assert policy.batch_rows == alone


@given(cases())
def test_every_waiting_request_leaves_if_batches_are_answered(case):
    """Each step sends a batch, expires a request or answers the batches in flight: the queue empties."""
    for _ in range(200):
        if not case.waiting.count:
            break
        decision = HOLD if case.in_flight >= case.policy.credits else case.decide()
        if decision == EXPIRE:
            case.waiting.expire(case.waiting.earliest().deadline)
        elif decision != HOLD:
            case.send(decision)
        elif case.in_flight:
            case.in_flight -= 1
            case.policy.estimator.removed(0.0)
        else:
            assert case.delay_s, "only a queue delay holds a batch back while nothing is in flight"
            break
    else:
        raise AssertionError("the queue did not empty")
