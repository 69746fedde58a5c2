"""Whatever arrives: within the limits, more for more load, steady for steady load, the same for the same facts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.plugins.fleet.controller.autoscale.decision import PoolFacts, ScaleLimits
from millstream.plugins.fleet.controller.autoscale.policy import PoolPolicy

ROW_S = 0.02
limits = st.builds(
    lambda low, more, latency_s, down_s: ScaleLimits(low, low + more, latency_s, down_s),
    st.integers(0, 5),
    st.integers(1, 50),
    st.floats(0.001, 5),
    st.floats(1, 150),
)
#: rows that arrive, rows that wait, ready workers, seconds until the next decision
steps = st.lists(
    st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.integers(0, 60), st.floats(0.01, 30)), min_size=1, max_size=60
)
starts_s = st.floats(0, 1000)


def decisions(allowed, trace, start_s, factor=1.0):
    policy, now = PoolPolicy("cpu", allowed), 50.0
    found = []
    for rows, waiting, ready, pause_s in trace:
        rows, waiting = rows * factor, waiting * factor
        facts = PoolFacts(rows, rows * ROW_S, waiting, waiting * ROW_S, 0.0, ready, start_s, ROW_S, ROW_S)
        found.append(policy.decide(facts, now))
        now += pause_s
    return found


@given(limits, steps, starts_s)
@settings(deadline=None)
def test_within_the_limits(allowed, trace, start_s):
    for decision in decisions(allowed, trace, start_s):
        assert allowed.workers_min <= decision.wanted <= allowed.workers_max


@given(limits, steps, starts_s, st.floats(1, 100))
@settings(deadline=None)
def test_more_load_never_wants_fewer(allowed, trace, start_s, factor):
    light, heavy = decisions(allowed, trace, start_s), decisions(allowed, trace, start_s, factor)
    assert all(one.wanted <= other.wanted for one, other in zip(light, heavy, strict=True))


@given(limits, steps, starts_s)
@settings(deadline=None)
def test_the_same_facts_give_the_same_decisions(allowed, trace, start_s):
    assert decisions(allowed, trace, start_s) == decisions(allowed, trace, start_s)


@given(limits, st.floats(0, 2000), st.integers(0, 10), st.floats(1, 60))
@settings(max_examples=25, deadline=None)
def test_a_constant_load_comes_to_rest(allowed, rows_per_s, ready, start_s):
    """After the first start time and `down_s` nothing changes any more."""
    policy, wanted = PoolPolicy("cpu", allowed), []
    for second in range(int(2 * allowed.down_s + start_s) + 60):
        facts = PoolFacts(rows_per_s, rows_per_s * ROW_S, 0, 0, 0.0, ready, start_s, ROW_S, ROW_S)
        wanted.append(policy.decide(facts, float(second)).wanted)
        ready = wanted[-1]
    assert sum(later < earlier for earlier, later in pairwise(wanted)) <= 1, wanted
    assert len(set(wanted[-40:])) == 1
