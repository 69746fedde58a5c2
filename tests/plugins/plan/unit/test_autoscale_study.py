"""The study of docs/autoscaling.md: its simulator counts what happens, and every rule stays in limits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.autoscaling.__main__ import LATENCY_S, MOST, VARIANTS, WORKER, study, table
from tests.bench.autoscaling.plot import Point, plot
from tests.bench.autoscaling.rules import Seen
from tests.bench.autoscaling.simulator import simulate
from tests.bench.autoscaling.traces import TRACES


class Fixed:
    """Wants the same number always."""

    name = "fixed"

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def wanted(self, seen: Seen, now: float) -> int:
        return self._workers


def test_enough_workers_miss_nothing_and_cost_what_they_run():
    outcome = simulate(Fixed(1), np.full(3600, 90.0), WORKER, LATENCY_S)
    assert (outcome.missed, outcome.changes) == (0.0, 0)
    assert outcome.worker_hours == pytest.approx(1)


def test_too_few_workers_miss_all_but_the_first_rows():
    assert simulate(Fixed(1), np.full(3600, 200.0), WORKER, LATENCY_S).missed > 0.99


def test_a_backlog_is_missed_until_it_is_worked_off():
    arrivals = np.full(100, 50.0)
    arrivals[10] = 550.0  # 500 more than a worker answers at once: 10 s of half its time
    assert simulate(Fixed(1), arrivals, WORKER, LATENCY_S).missed == pytest.approx(1000 / 5500, rel=0.1)


@pytest.mark.parametrize("trace", TRACES)
def test_rules_stay_in_limits_and_answer(trace):
    arrivals = TRACES[trace](1800, np.random.default_rng(5))
    for variant in VARIANTS:
        outcome = simulate(variant.rule(), arrivals, WORKER, LATENCY_S)
        assert 0 <= outcome.missed <= 1
        assert 1 <= outcome.most <= MOST


def test_the_table_has_mean_and_spread_over_the_seeds():
    results = study(0.1, (1, 2))
    assert {one.trace for one in results} == set(TRACES)
    again = {(one.trace, one.rule, one.setting): one for one in study(0.1, (1,))}
    other = {(one.trace, one.rule, one.setting): one for one in study(0.1, (2,))}
    for one in results:
        first, second = (found[one.trace, one.rule, one.setting] for found in (again, other))
        assert one.missed == pytest.approx((first.missed + second.missed) / 2)
        assert one.missed_deviation == pytest.approx(abs(first.missed - second.missed) / 2)
        assert one.worker_hours_deviation == pytest.approx(abs(first.worker_hours - second.worker_hours) / 2)
    assert sum(" ± " in line for line in table(results).splitlines()) == sum(one.usual for one in results)


def test_the_plot_has_a_point_for_each_variant():
    drawn = plot([Point("steps", "Knative", "x < y", 12.0, 0.01), Point("bursts", "Ray Serve", "z", 20.0, 0.0)])
    assert drawn.count("<title>") == 2
    assert "x &lt; y" in drawn
