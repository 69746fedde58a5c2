"""What bounds the changes between a version's preferred pool and the next one while the preferred one is nearly full.

A request leaves the preferred pool if that would answer it too late, whatever the next pool predicts for it: close
predictions of two pools decide nothing. Between two events of the preferred pool (a batch that leaves or is answered,
time that passes) equal requests change pools once, away from it. With nothing in it, it takes the next request.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.services.errors import Failure
from tests.kit.pool_lanes import PoolLanes

GPU = {1: 0.004, 8: 0.008}
TIMEOUT_S = 0.05

Step = Literal["ask", "turn", "reply", "wait"]
STEPS = st.tuples(
    st.integers(30, 60).map(lambda number: ["ask"] * number),  # until it is nearly full
    st.lists(st.sampled_from(["ask", "ask", "ask", "ask", "turn", "reply", "wait"]), max_size=100),
).map(lambda parts: parts[0] + parts[1])
#: of the other pool: much slower, about as fast, the same, faster
OTHERS = st.sampled_from([{1: 0.5, 8: 0.9}, {1: 0.0041, 8: 0.0082}, GPU, {1: 0.001, 8: 0.002}])


class Choices:
    """Equal requests to a version in two pools; `taken`: the pool of each, and the events of the preferred pool so far.

    A request that no pool takes went to pool "": it left the preferred one, too.
    """

    def __init__(self, folder: str, other: dict[int, float]) -> None:
        self.pools = PoolLanes(Path(folder), {"gpu": GPU, "cpu": other}, rows_waiting_max=64)
        for pool in ("gpu", "cpu"):
            self.pools.has(pool, 1)
        self.taken: list[tuple[str, int]] = []
        self.events = 0

    def step(self, step: Step) -> None:
        if step == "ask":
            self.ask()
            return
        self.events += 1
        if step == "turn":
            self.pools.turn()
        elif step == "wait":
            self.pools.bench.now += 0.003
        elif self.pools.links["gpu"].waiting:
            self.pools.answer("gpu")

    def ask(self) -> str:
        try:
            pool = self.pools.add(timeout_s=TIMEOUT_S).lane.pool
        except Failure:
            pool = ""
        self.taken.append((pool, self.events))
        return pool

    def drain(self) -> None:
        """Answer all that is in the preferred pool."""
        for _ in range(500):
            self.pools.turn()
            if not self.pools.links["gpu"].waiting and not self.pools.waiting("gpu"):
                return
            while self.pools.links["gpu"].waiting:
                self.pools.answer("gpu")
        raise AssertionError("the preferred pool does not empty")


@settings(deadline=None)
@given(STEPS, OTHERS)
def test_equal_requests_change_pools_once_between_two_events_and_come_back(steps, other):
    with tempfile.TemporaryDirectory() as folder:
        choices = Choices(folder, other)
        for step in steps:
            choices.step(step)
        back = [
            (before, after)
            for (before, at), (after, later) in pairwise(choices.taken)
            if before != "gpu" and after == "gpu" and at == later
        ]
        assert not back, "a request came back to the preferred pool although nothing had happened there"
        choices.drain()
        assert choices.ask() == "gpu", "the cause is over"


@settings(deadline=None, max_examples=50)
@given(STEPS, OTHERS)
def test_the_predictions_of_the_next_pool_do_not_decide(steps, other):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as another:
        taken = []
        for folder, profile in ((one, other), (another, {1: 30.0, 8: 50.0})):
            choices = Choices(folder, profile)
            for step in steps:
                choices.step(step)
            taken.append([pool == "gpu" for pool, _ in choices.taken])
        assert taken[0] == taken[1]


@pytest.mark.parametrize("other", [{1: 0.0041, 8: 0.0082}, GPU, {1: 0.5, 8: 0.9}])
def test_a_burst_overflows_once_and_the_changes_are_at_most_two_for_each_batch(tmp_path, other):
    choices = Choices(str(tmp_path), other)
    pools = [choices.ask() for _ in range(200)]
    first = pools.index("cpu")
    assert set(pools[:first]) == {"gpu"}
    assert "gpu" not in pools[first:]
    batches = 0
    for _ in range(40):  # callers keep the preferred pool full
        choices.pools.turn()
        if choices.pools.links["gpu"].waiting:
            choices.pools.answer("gpu")
            batches += 1
        pools += [choices.ask() for _ in range(20)]
    changes = sum(before != after for before, after in pairwise("gpu" if one == "gpu" else "" for one in pools))
    assert batches > 0
    assert changes <= 2 * batches + 1
