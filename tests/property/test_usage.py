"""Probabilities of the next call are probabilities; models called like clockwork are found, and no others."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.services.placement.usage import (
    BUCKET_MAX,
    GAP_S_MIN,
    HALVE_AT,
    NO_USAGE,
    Usage,
    bucket_end_s,
    bucket_of,
)
from tests.kit.fleets import seconds, usage_of, usages


@given(usages(), seconds, seconds)
def test_it_is_a_probability(usage, idle_s, horizon_s):
    assert 0.0 <= usage.next_use_probability(idle_s, horizon_s) <= 1.0


@given(usages(), seconds, st.lists(seconds, min_size=2, max_size=2).map(sorted))
def test_a_longer_horizon_is_never_less_likely(usage, idle_s, horizons_s):
    shorter_s, longer_s = horizons_s
    assert usage.next_use_probability(idle_s, shorter_s) <= usage.next_use_probability(idle_s, longer_s) + 1e-12


@given(st.floats(0, 1e9, allow_nan=False))
def test_a_bucket_contains_its_gap(gap_s):
    bucket = bucket_of(gap_s)
    assert 0 <= bucket <= BUCKET_MAX
    if bucket < BUCKET_MAX:
        assert gap_s <= bucket_end_s(bucket) * (1 + 1e-9)
    if bucket > 0:
        assert gap_s >= bucket_end_s(bucket - 1) * (1 - 1e-9)


@given(usages())
def test_it_survives_the_wire(usage):
    packed = json.loads(json.dumps(usage.pack()))
    again = Usage.unpack(packed)
    assert again.pack() == usage.pack()
    assert bool(again.period_s) == bool(usage.period_s) or usage.deviation_s / usage.mean_s == pytest.approx(0.1, 0.01)


@pytest.mark.parametrize("packed", [{"7": -1}, {"7": float("inf")}, {"101": 1}, {"-1": 1}, {"mean": float("nan")}])
def test_what_is_no_histogram_is_refused(packed):
    with pytest.raises(ValueError, match="not a histogram"):
        Usage.unpack(packed)


def test_a_name_of_a_later_release_is_left_out():
    assert Usage.unpack({"7": 2, "skew": 0.5}) == Usage({7: 2.0})


@given(st.lists(st.floats(0, 1e5, allow_nan=False), max_size=400))
def test_its_size_is_bounded(gaps_s):
    usage = usage_of(gaps_s)
    assert sum(usage.gaps.values()) <= 2 * HALVE_AT + 1
    assert len(usage.gaps) <= BUCKET_MAX + 1


def test_a_burst_does_not_push_the_gaps_between_bursts_out():
    three = [600.0, 600.0, 600.0]
    expected = usage_of(three).next_use_probability(540.0, 70.0)
    usage = usage_of([*three, *[0.01] * 10_000])
    assert usage.next_use_probability(540.0, 70.0) == expected
    assert expected > 4 * usage_of([600.0]).next_use_probability(1200.0, 70.0)
    assert usage.with_gap(0.01) is usage, "a gap in a long burst costs nothing"


def test_a_model_that_changes_its_habits_is_followed():
    usage = usage_of([30.0] * 500 + [7200.0] * 40)
    assert usage.next_use_probability(600.0, 600.0) < 0.1
    assert usage.next_use_probability(7000.0, 600.0) > 0.9


@pytest.mark.parametrize("period_s", [20.0, 300.0, 3600.0, 86_400.0])
@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.05])
def test_a_timer_is_found_with_its_jitter(period_s, jitter):
    random_numbers = random.Random(7)
    found = 0
    for _ in range(100):
        usage = NO_USAGE
        for _ in range(20):
            usage = usage.with_gap(period_s * (1 + random_numbers.gauss(0, jitter)))
        found += usage.period_s == pytest.approx(period_s, rel=0.1)
    assert found >= 98


def test_bursts_like_clockwork_have_the_period_of_the_bursts():
    usage = usage_of([*[0.2] * 5, 900.0] * 8)
    assert usage.period_s == pytest.approx(900.0)


@pytest.mark.parametrize("mean_s", [20.0, 600.0, 86_400.0])
def test_poisson_calls_are_seldom_taken_for_clockwork(mean_s):
    """The share of instants at which a model with Poisson calls counts as called like clockwork: its false alarms."""
    random_numbers = random.Random(11)
    alarms = checks = 0
    for _ in range(200):
        usage = NO_USAGE
        for _ in range(100):
            usage = usage.with_gap(random_numbers.expovariate(1 / mean_s))
            checks += 1
            alarms += usage.period_s > 0
    assert alarms / checks < 0.002


def test_bursty_calls_are_seldom_taken_for_clockwork():
    random_numbers = random.Random(13)
    alarms = checks = 0
    for _ in range(200):
        usage = NO_USAGE
        for _ in range(100):
            usage = usage.with_gap(GAP_S_MIN + random_numbers.gammavariate(0.1, 3000.0))
            checks += 1
            alarms += usage.period_s > 0
    assert alarms / checks < 0.002
