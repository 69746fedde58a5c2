"""The policy of autoscaling: up at once, down late, to zero, within limits, not for bursts shorter than a start."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from millstream.plugins.fleet.controller.autoscale.decision import PoolFacts, ScaleLimits
from millstream.plugins.fleet.controller.autoscale.history import GAP_S_MAX, Envelope, Largest, Recurrence
from millstream.plugins.fleet.controller.autoscale.policy import PoolPolicy

ROW_S = 0.01
LIMITS = ScaleLimits(1, 20, latency_s=0.2, down_s=60)


class Traffic:
    """A pool under a virtual clock, whose workers work off what arrives and start after `start_s`."""

    def __init__(self, limits: ScaleLimits = LIMITS, *, ready: int = 1, start_s: float = 3.0) -> None:
        self.policy = PoolPolicy("cpu", limits)
        self.ready, self.start_s = ready, start_s
        self.now = 1000.0
        self.queue_work_s = 0.0
        self.starting: list[float] = []  # instants
        self.sizes: list[int] = []
        self.last = self.policy.decide(self.facts(0), self.now)

    def facts(self, rows: float) -> PoolFacts:
        queue_rows = self.queue_work_s / ROW_S
        return PoolFacts(
            rows, rows * ROW_S, queue_rows, self.queue_work_s, 0.0, self.ready, self.start_s, ROW_S * 4, ROW_S
        )

    def run(self, seconds: int, rows_per_s: float) -> list[int]:
        """Let rows arrive for some seconds; return the workers that were wanted after each second."""
        wanted = []
        for _ in range(seconds):
            self.now += 1
            self.ready += sum(at <= self.now for at in self.starting)
            self.starting = [at for at in self.starting if at > self.now]
            self.queue_work_s = max(0.0, self.queue_work_s + rows_per_s * ROW_S - self.ready)
            self.last = self.policy.decide(self.facts(rows_per_s), self.now)
            missing = self.last.wanted - self.ready - len(self.starting)
            self.starting += [self.now + self.start_s] * missing
            if missing < 0:
                self.ready = self.last.wanted - len(self.starting)
            wanted.append(self.last.wanted)
        return wanted


def test_work_of_a_gap_is_not_work_of_a_moment():
    """Redis was away for a minute: the counters of that minute come at once."""
    envelope = Envelope()
    for second in range(10):
        envelope.add(second, 1.0, 100)
    envelope.add(69, 60.0, 6000)
    for window_s in (1, 5, 30):
        assert envelope.rate(window_s) == pytest.approx(1.0)
        assert envelope.rows_per_s(window_s) == pytest.approx(100)


def changes(wanted: list[int]) -> int:
    return sum(one != other for one, other in pairwise(wanted))


def test_a_step_is_followed_within_a_start_and_the_backlog_is_worked_off():
    traffic = Traffic()
    assert set(traffic.run(30, 50)) == {1}
    risen = traffic.run(20, 500)
    assert risen[2] >= 6  # after one start time of the step its rate is known
    assert traffic.queue_work_s == 0
    assert sorted(risen) == risen


def test_workers_go_after_down_s_and_not_before():
    traffic = Traffic()
    traffic.run(30, 500)
    assert min(traffic.run(50, 50)) >= 7  # what 500 rows a second need without a backlog
    fallen = traffic.run(60, 50)
    assert fallen[-1] == 1
    assert sorted(fallen, reverse=True) == fallen


def test_a_burst_that_ends_before_a_worker_could_serve_starts_none():
    traffic = Traffic(start_s=10)
    traffic.run(30, 10)
    assert set(traffic.run(2, 300) + traffic.run(30, 10)) == {1}


def test_the_same_burst_starts_workers_that_serve_in_time():
    traffic = Traffic(start_s=2)
    traffic.run(30, 10)
    assert max(traffic.run(2, 300) + traffic.run(30, 10)) > 1


def test_a_pool_scales_to_zero_and_a_single_row_brings_a_worker():
    traffic = Traffic(ScaleLimits(0, 4, down_s=30))
    assert traffic.run(60, 0)[-1] == 0
    assert traffic.run(1, 0.001) == [1]
    assert traffic.last.reason == "backlog"


def test_a_refused_row_of_unknown_length_brings_a_worker():
    policy = PoolPolicy("cpu", ScaleLimits(0, 4))
    assert policy.decide(PoolFacts(), 0.0).wanted == 0
    assert policy.decide(PoolFacts(rows=1), 1.0).wanted == 1


def test_a_row_that_waits_and_whose_length_is_unknown_brings_a_worker():
    policy = PoolPolicy("cpu", ScaleLimits(0, 4))
    assert policy.decide(PoolFacts(queue_rows=1), 0.0).wanted == 1


def test_never_more_than_the_budget():
    traffic = Traffic(ScaleLimits(1, 3))
    assert max(traffic.run(60, 5000)) == 3
    assert traffic.last.reason == "maximum"


def test_a_pool_without_limits_keeps_what_runs_whatever_arrives():
    policy = PoolPolicy("cpu", ScaleLimits(0, 1024, down_s=1, bounded=False), kept=7)
    for second, running in enumerate((2, 2, 3, 3, 0, 1)):
        decision = policy.decide(PoolFacts(rows=1e4, work_s=100.0, ready=1, running=running), float(second))
        assert (decision.wanted, decision.workers_min, decision.workers_max) == (running, running, running)
        assert decision.reason == "unbounded"
        assert "MILLSTREAM_POOLS" in decision.explanation[-1]


def test_a_new_leader_keeps_what_the_earlier_one_wanted():
    policy = PoolPolicy("cpu", ScaleLimits(1, 10, down_s=60), kept=7)
    assert policy.decide(PoolFacts(ready=2), 0.0).wanted == 7
    assert policy.decide(PoolFacts(ready=7), 59.0).wanted == 7
    assert policy.decide(PoolFacts(ready=7), 61.0).wanted == 1


def test_a_new_leader_keeps_what_runs():
    policy = PoolPolicy("cpu", ScaleLimits(1, 10, down_s=60))
    assert policy.decide(PoolFacts(ready=5), 0.0).wanted == 5


def test_a_lower_budget_counts_at_once():
    traffic = Traffic()
    traffic.run(30, 800)
    traffic.policy.limits = ScaleLimits(1, 4)
    assert traffic.run(1, 800) == [4]


def test_noise_does_not_change_the_pool_again_and_again():
    traffic = Traffic()
    wanted = [traffic.run(1, 300 + (-1) ** second * 60)[0] for second in range(600)]
    settled = wanted[20:]
    assert sorted(settled, reverse=True) == settled  # it may shrink after the first rise, and never grows again
    assert changes(settled) <= 2


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_at_a_steady_rate_change_the_pool_no_more(seed):
    traffic = Traffic(ScaleLimits(1, 20, latency_s=0.5, down_s=120))
    arrivals = np.random.default_rng(seed).poisson(60, 3600)
    wanted = [traffic.run(1, 5 * float(rows))[0] for rows in arrivals]  # few rows, five times as long
    assert changes(wanted[300:]) == 0


def test_the_arithmetic_names_its_figures():
    traffic = Traffic()
    traffic.run(30, 500)
    text = "\n".join(traffic.last.explanation)
    for part in ("a row takes 10 ms", "slack 0.16 s", "arrivals:", "backlog:", "needed now:", f"{traffic.last.wanted}"):
        assert part in text


@pytest.mark.parametrize("row_s", [2.88e-6, 4000.0])
def test_the_arithmetic_is_written_without_exponents(row_s):
    policy = PoolPolicy("cpu", LIMITS)
    for second in range(20):
        decision = policy.decide(PoolFacts(3, 3 * row_s, 2, 2 * row_s, 0.0, 1, 3.0, 9 * row_s, row_s), 1000.0 + second)
    text = "\n".join(decision.explanation)
    assert not re.search(r"\de[+-]\d", text), text
    assert ("longest run 0.0259 ms" in text) is (row_s < 1)


def test_the_envelope_knows_rates_and_forgets_what_is_old():
    envelope = Envelope()
    for second in range(1300):
        envelope.add(second, 2.0 if second < 650 else 0.5, 10)
    assert envelope.known_s == pytest.approx(600, abs=1)
    assert envelope.rate(10) == pytest.approx(0.5)
    assert envelope.rows_per_s(600) == pytest.approx(10)
    assert envelope.rate(600) == pytest.approx(0.5)


def test_the_largest_value_of_a_time():
    largest = Largest()
    for at, value in enumerate([3.0, 9.0, 2.0, 4.0]):
        largest.add(at, value)
    assert largest.within(3, 10) == (1, 9.0)
    assert largest.within(3.5, 1) == (3, 4.0)
    assert largest.within(9, 1) == (9, 0.0)
    largest.forget(3)
    assert largest.within(3.5, 10) == (3, 4.0)


def burst(traffic: Traffic, pause_s: int, rows_per_s: float = 600) -> int:
    """Return for how many seconds rows waited: in a burst of 20 s, as long as a start, and in the pause after it."""
    late = 0
    for _ in range(20):
        traffic.run(1, rows_per_s)
        late += traffic.queue_work_s > 0
    for _ in range(pause_s):
        traffic.run(1, 50)
        late += traffic.queue_work_s > 0
    return late


@pytest.mark.parametrize("down_s", [60, 150])
def test_workers_stay_for_bursts_that_recur(down_s):
    traffic = Traffic(ScaleLimits(1, 20, latency_s=0.2, down_s=down_s), start_s=20)
    late = [burst(traffic, 280) for _ in range(7)]
    assert min(late[:3]) > 10, late  # each began with one worker
    assert max(late[3:]) == 0, late
    assert traffic.last.reason == "recurring"
    assert any("bursts recur" in line for line in traffic.last.explanation)


def test_workers_go_when_recurring_bursts_end():
    traffic = Traffic(start_s=20)
    for _ in range(5):
        burst(traffic, 280)
    assert traffic.run(600, 50)[-1] == 1
    before = burst(traffic, 280)
    assert before > 0, "it was forgotten"


def test_bursts_at_irregular_intervals_keep_nothing():
    traffic = Traffic(start_s=20)
    for pause_s in (200, 500, 150, 800, 300):
        burst(traffic, pause_s)
        assert traffic.last.wanted == 1
        assert traffic.last.reason != "recurring"


def test_single_calls_at_regular_intervals_keep_no_worker_of_a_pool_that_may_have_none():
    traffic = Traffic(ScaleLimits(0, 4, down_s=30), ready=0)
    for _ in range(6):
        assert traffic.run(1, 1) == [1]
        assert traffic.run(99, 0)[-1] == 0


def test_recurring_bursts_keep_what_arrivals_need_not_what_a_backlog_needed():
    traffic = Traffic(start_s=20)
    for _ in range(8):
        burst(traffic, 280)
    assert traffic.last.wanted <= 9, traffic.last.explanation  # 600 rows/s: 6 / 80 %, and 90 % of that


def test_an_interval_is_learned_from_gaps_alike_and_forgotten_when_a_burst_does_not_come():
    recurrence = Recurrence()
    for at in (1000, 1300):
        assert recurrence.keep_s == 0
        recurrence.shrank(at - 290.0)
        recurrence.shrank(at - 200.0)
        recurrence.needed(1, 1, at - 1.0)
        recurrence.needed(9, 9, at)
        recurrence.grew(at)
        recurrence.grew(at + 5)
    assert 290 < recurrence.keep_s < 400
    recurrence.shrank(1700.0)
    assert recurrence.keep_s == 0
    recurrence.grew(1700.0 + GAP_S_MAX + 1)
    recurrence.shrank(3000.0)
    recurrence.grew(3290)
    assert recurrence.keep_s == 0
