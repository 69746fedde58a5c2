"""When a lane will have answered, by hand."""

from __future__ import annotations

import pytest

from millstream.gateway.scheduling.batching.dispatch import OUTLIER, SLOWDOWN_MAX, LatencyEstimator
from millstream.gateway.scheduling.request import Request
from millstream.services.model.profile import Profile
from tests.kit.responders import DISCARD


def estimator(seconds: dict[int, float], instances: int = 1) -> LatencyEstimator:
    made = LatencyEstimator()
    made.update(instances, Profile(seconds), max(seconds))
    return made


def request(timeout_s: float, rows: int = 1, now: float = 0.0) -> Request:
    return Request((), rows, 0, now, now + timeout_s, DISCARD)


def test_batches_run_one_after_the_other():
    one = estimator({1: 1.0, 4: 2.0})
    assert one.free_at == 0
    one.put(2.0, now=10.0)
    assert one.free_at == 12
    one.put(1.0, now=10.5)
    assert one.free_at == 13
    one.replied(2.0, now=12.0)
    assert one.free_at == 13
    one.replied(1.0, now=13.0)
    assert one.free_at == 0
    assert one.slowdown == pytest.approx(1)


def test_with_two_instances_the_second_batch_starts_at_once():
    two = estimator({1: 1.0}, instances=2)
    two.put(1.0, now=0.0)
    assert two.free_at == 0
    two.put(1.0, now=0.0)
    assert two.free_at == pytest.approx(0.5)  # on average: one of them is half done
    two.put(1.0, now=0.0)
    assert two.free_at == pytest.approx(1.0)
    assert (two.full_s, two.step_s) == (1.0, 0.5)


def test_a_request_is_answered_after_what_is_out_and_what_waits():
    one = estimator({1: 1.0, 4: 2.0})
    one.put(2.0, now=0.0)
    assert one.answer_at(0, request(60)) == 4
    assert one.answer_at(3, request(60)) == 4
    assert one.answer_at(4, request(60)) == 6
    assert one.answer_at(4, request(60, now=3.0)) == 7


def test_a_run_is_planned_that_takes_at_most_half_of_the_time():
    one = estimator({1: 1.0, 4: 2.0})
    assert one.planned_s(request(4)) == 2
    assert one.planned_s(request(3)) == 1.5
    assert one.planned_s(request(1)) == 1  # no run is shorter
    assert one.planned_s(request(1, rows=3)) == pytest.approx(1 + 2 / 3)


def test_the_rows_that_fit_into_a_time():
    one = estimator({1: 1.0, 4: 2.0})
    assert [one.rows_within(seconds) for seconds in (0, 1, 1.4, 1.7, 2, 9)] == [1, 1, 2, 3, 4, 4]


def test_the_pace_follows_the_replies_of_a_busy_lane():
    one, now = estimator({1: 1.0}), 0.0
    one.put(1.0, now)
    for _ in range(200):
        one.put(1.0, now)
        now += 3
        one.replied(1.0, now)
    assert one.slowdown == pytest.approx(3, rel=0.01)
    assert one.margin_s < 0.1  # it is slow, but it is steady
    one.update(1, Profile({1: 3.0}), 1)  # the workers say so themselves
    assert one.slowdown == pytest.approx(1, rel=0.01)


def test_fewer_rows_in_a_run_are_no_other_pace():
    profile = Profile({1: 1.0, 16: 3.0})
    one = LatencyEstimator()
    for rows in (16, 1, 16):
        one.update(1, profile, rows)
        assert one.slowdown == 1
    assert one.full_s == 3


def test_replies_that_come_irregularly_ask_for_a_margin():
    one, now = estimator({1: 1.0}), 0.0
    one.put(1.0, now)
    for number in range(200):
        one.put(1.0, now)
        now += 0.5 + number % 2
        one.replied(1.0, now)
    assert one.slowdown == pytest.approx(1, abs=0.1)
    assert one.margin_s == pytest.approx(1.5, abs=0.1)


def test_after_an_idle_time_a_slow_reply_says_nothing():
    one = estimator({1: 0.001})
    for now in range(100):
        one.put(0.001, float(now))
        one.replied(0.001, now + 0.5)  # the way through the queue
    assert one.slowdown == 1


def test_one_long_pause_is_no_pace():
    one = estimator({1: 0.001})
    one.put(0.001, 0.0)
    one.put(0.001, 0.0)
    one.replied(0.001, 0.001)
    one.replied(0.001, 60.0)
    assert one.slowdown < 1 + OUTLIER / 16
    one.put(0.001, 60.0)
    for now in range(61, 1061):
        one.put(0.001, now)
        one.replied(0.001, now)
    assert one.slowdown == pytest.approx(SLOWDOWN_MAX)


def test_what_is_forgotten_keeps_nobody_waiting():
    one = estimator({1: 1.0})
    one.put(1.0, 0.0)
    one.put(1.0, 0.0)
    one.removed(1.0)
    assert one.free_at == 1
    one.removed(1.0)
    assert one.free_at == 0


def test_without_a_profile_nothing_takes_time():
    nothing = LatencyEstimator()
    nothing.put(0.0, 5.0)
    nothing.replied(0.0, 6.0)
    assert (nothing.slowdown, nothing.full_s, nothing.answer_at(100, request(1, now=6.0))) == (1, 0, 6)
