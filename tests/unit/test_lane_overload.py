"""Far more is asked than can be done, in a simulated time: nearly all that is done is done in time.

Poisson arrivals ─> lane ─> a worker that runs one batch after the other, with runs that vary ─> answers by their
deadline
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Failure
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.model.profile import Profile
from millstream.services.wire.batch import decode_batch
from tests.kit.lane_harness import LaneBench

TIMES = 5  # the capacity
SECONDS = 10.0
TICK_S = 0.01


class Callers:
    """Count what is answered in time."""

    protocol = RequestProtocol.V2

    def __init__(self) -> None:
        self.good = self.refused = self.late = 0
        self.now = 0.0

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        for request in requests:
            self._count(request)

    def answer_one(self, request: Request, reply: Reply) -> None:
        self._count(request)

    def fail(self, request: Request, failure: Failure) -> None:
        self.late += 1

    def _count(self, request: Request) -> None:
        in_time = self.now <= request.deadline
        self.good += in_time
        self.late += not in_time


class Storm:
    """`times`: of the capacity.

    `patience`: timeout of each request, in runs with all rows. `varies`: by how much a run may be longer.
    """

    def __init__(self, home: Path, profile: dict[int, float], times: float, patience: float, varies: float) -> None:
        self._bench = LaneBench(home, profile)
        self._profile, self._varies = Profile(profile), varies
        self.callers = Callers()
        self._random = random.Random(1)
        rows = max(profile)
        full_s = self._profile.predict(rows) * (1 + varies / 2)
        self.capacity = rows / full_s
        self._rate = times * self.capacity
        self._timeout_s = patience * full_s

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        bench = self._bench
        end, tick = bench.now + seconds, bench.now + TICK_S
        arrival, done = bench.now, float("inf")
        while bench.now < end:
            if done == float("inf") and bench.link.waiting:
                rows = sum(decode_batch(bench.link.waiting[0][0])[0].rows)
                done = bench.now + self._profile.predict(rows) * self._random.uniform(1, 1 + self._varies)
            bench.now = self.callers.now = min(arrival, done, tick)
            if bench.now == tick:
                tick += TICK_S
                for batch in list(bench.pending.values()):
                    bench.lanes.of(batch.lane).recovery.expire(batch, bench.now)
                bench.lane.tick(bench.now)
            elif bench.now == done:
                done = float("inf")
                bench.answer()
            else:
                arrival += self._random.expovariate(self._rate)
                self._ask()

    def _ask(self) -> None:
        try:
            self._bench.lane.add(self._bench.request(timeout_s=self._timeout_s, responder=self.callers), 16)
        except Failure as refusal:
            assert refusal.retry_after_s is not None
            self.callers.refused += 1
        self._bench.turn()


@pytest.mark.parametrize("varies", [0.0, 0.3])
@pytest.mark.parametrize(
    ("profile", "patience"),
    [
        ({1: 0.015}, 3),
        ({1: 0.002, 16: 0.015}, 3),
        ({1: 0.048, 8: 0.05}, 4),
        ({1: 0.001, 8: 0.003}, 4),
        ({1: 0.002, 16: 0.015}, 20),
    ],
    ids=str,
)
def test_in_a_storm_nearly_all_that_is_run_is_in_time(tmp_path, profile, patience, varies):
    storm = Storm(tmp_path, profile, TIMES, patience, varies)
    storm.run(SECONDS)
    callers = storm.callers
    goodput = callers.good / SECONDS / storm.capacity
    print({"goodput": round(goodput, 2), "good": callers.good, "late": callers.late, "refused": callers.refused})
    assert goodput > 0.9
    assert callers.late < 0.15 * callers.good


@pytest.mark.parametrize("profile", [{1: 0.015}, {1: 0.002, 16: 0.015}], ids=str)
def test_below_the_capacity_nothing_is_refused_or_late(tmp_path, profile):
    storm = Storm(tmp_path, profile, 0.5, patience=10, varies=0.3)
    storm.run(SECONDS)
    assert (storm.callers.refused, storm.callers.late) == (0, 0)
    assert storm.callers.good > 0.4 * SECONDS * storm.capacity
