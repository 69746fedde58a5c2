"""What a process knows of Redis' clock: how exactly, and what becomes of it when a clock is set."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.services.queue.pipeline import DRIFT, RedisClock


class Machine:
    """Time that a test makes: a monotonic clock, and Redis' clock beside it."""

    def __init__(self, offset_s: float) -> None:
        self.monotonic = 1000.0
        self.offset_s = offset_s

    def measure(self, clock: RedisClock, there_s: float, back_s: float) -> None:
        asked = self.monotonic
        redis_us = round((asked + there_s + self.offset_s) * 1e6)
        self.monotonic += there_s + back_s
        clock.record_measurement(
            asked, self.monotonic, [b"%d" % (redis_us // 1_000_000), b"%d" % (redis_us % 1_000_000)]
        )

    def error_s(self, clock: RedisClock) -> float:
        return abs(clock.offset_ms / 1000 - self.offset_s)


LATENCY_S = st.floats(0, 0.5)


@given(
    st.floats(-1e9, 1e9),
    st.lists(st.tuples(LATENCY_S, LATENCY_S, st.floats(0, 600), st.floats(-1, 1)), min_size=1, max_size=20),
)
def test_it_is_never_further_off_than_the_quickest_answer_of_late_explains(offset_s, measurements):
    machine, clock = Machine(offset_s), RedisClock()
    bound_s = float("inf")
    for there_s, back_s, pause_s, drift in measurements:
        machine.measure(clock, there_s, back_s)
        bound_s = min(bound_s + (there_s + back_s) * DRIFT, (there_s + back_s) / 2)
        assert machine.error_s(clock) <= bound_s + 2e-6 + abs(offset_s) * 1e-12
        machine.monotonic += pause_s
        machine.offset_s += pause_s * drift * DRIFT / 2  # the clocks drift apart, as far as clocks do
        bound_s += pause_s * DRIFT * 1.5


@pytest.mark.parametrize("step_s", [-3600.0, -1.0, 1.0, 31.0, 1e7])
def test_a_clock_that_was_set_is_followed_at_once(step_s):
    machine, clock = Machine(5e8), RedisClock()
    for _ in range(100):
        machine.measure(clock, 0.0001, 0.0001)
    machine.offset_s += step_s
    machine.measure(clock, 0.0002, 0.0001)
    assert machine.error_s(clock) < 0.001


def test_an_answer_that_came_late_makes_it_no_worse():
    machine, clock = Machine(5e8), RedisClock()
    machine.measure(clock, 0.0001, 0.0001)
    machine.measure(clock, 0.0, 9.0)  # this process was stopped in between
    assert machine.error_s(clock) < 0.01


def test_the_wall_clock_of_this_machine_does_not_matter(monkeypatch):
    clock = RedisClock()
    machine = Machine(7e8)
    machine.monotonic = time.monotonic()
    machine.measure(clock, 0.0, 0.0)
    before = clock.now_ms()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock.now_ms() <= (time.monotonic() + 7e8) * 1000 + 1
