"""Delays between attempts: they double up to a limit, and processes draw different ones."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.retry import Retry

from millstream.services.process.waits import Backoff, backoff_s, with_jitter
from millstream.services.queue.url import RETRY_S_MAX, RETRY_S_MIN, RedisAddress, async_client, client

DELAYS_S = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
PROGRAM = """
from millstream.services.process.waits import Backoff
backoff = Backoff()
print([backoff.after_death() for _ in range(8)])
"""


def longest() -> float:
    return 1 - 2**-53  # the largest number that random() returns


def test_the_delay_doubles_to_a_limit_and_resets_after_a_long_life() -> None:
    backoff = Backoff(draw=longest)
    assert [backoff.after_death(1) for _ in range(9)] == pytest.approx(DELAYS_S)
    assert backoff.after_death(30) == pytest.approx(0.1)
    assert backoff.after_death(29) == pytest.approx(0.2)
    for _ in range(100_000):
        backoff.after_death(0)
    assert backoff.after_death(0) == pytest.approx(10)


def test_the_shortest_delay_is_half_the_longest() -> None:
    backoff = Backoff(draw=lambda: 0.0)
    assert [backoff.after_death(1) for _ in range(9)] == pytest.approx([delay_s / 2 for delay_s in DELAYS_S])


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 10**6), st.floats(0.001, 1), st.floats(1, 100), st.floats(0, 1, exclude_max=True))
def test_a_delay_is_within_its_bounds(attempt: int, low_s: float, high_s: float, drawn: float) -> None:
    delay_s = backoff_s(attempt, low_s, high_s, lambda: drawn)
    assert low_s / 2 <= delay_s <= high_s
    assert high_s / 2 <= with_jitter(high_s, lambda: drawn) <= high_s


def test_generators_with_other_seeds_spread() -> None:
    first, second = (Backoff(draw=Random(seed).random) for seed in (1, 2))
    pairs = [(first.after_death(), second.after_death()) for _ in range(20)]
    assert all(one != other for one, other in pairs)
    assert sum(one < other for one, other in pairs) in range(3, 18)


def test_two_processes_draw_different_delays() -> None:
    outputs = {subprocess.check_output([sys.executable, "-c", PROGRAM], text=True) for _ in range(2)}
    assert len(outputs) == 2


def test_clients_of_redis_py_have_jitter() -> None:
    address = RedisAddress.unix("/none")
    for made in (client(address), async_client(address)):
        retry = made.get_retry()
        assert isinstance(retry, Retry) or retry is not None
        backoff = retry._backoff
        drawn = {backoff.compute(10) for _ in range(20)}
        assert len(drawn) == 20
        assert all(RETRY_S_MAX / 2 <= delay_s <= RETRY_S_MAX for delay_s in drawn)
        assert RETRY_S_MIN / 2 <= backoff.compute(1) <= RETRY_S_MIN
