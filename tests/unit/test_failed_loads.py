"""When versions are tried again whose loads failed, on a clock of the test."""

from __future__ import annotations

import pytest

from millstream.workers.residency.version_loads import (
    FAILED_OFTEN_RETRY_S,
    FAILED_RETRY_S,
    FAILURES_MAX,
    LOST_RETRY_S,
    RETRY_S,
    FailedLoads,
)


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.loads = FailedLoads(lambda: self.now, lambda: 1.0)  # the longest pauses

    def fail(self, reason: str = "damaged", *, passing: bool = False, final: bool = False) -> bool:
        """Fail, and return whether it failed for that reason before."""
        failed = self.loads.next("m", reason, passing=passing, final=final)
        self.loads.note("m", failed)
        return failed.repeated

    def tried_after(self) -> float:
        """Let time pass until it is tried again; return how long that was, in seconds of a tenth."""
        began = self.now
        while not self.loads.take_due("m"):
            self.now += 0.1
            assert self.now < began + 1000
        return self.now - began


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_pause_is_a_minute_and_five_from_the_third_failure_on(bench: Bench) -> None:
    for failures in range(1, FAILURES_MAX + 2):
        bench.fail()
        pause_s = FAILED_RETRY_S if failures < FAILURES_MAX else FAILED_OFTEN_RETRY_S
        assert bench.tried_after() == pytest.approx(pause_s, abs=0.2)
        assert bench.loads.of("m")[0] == failures


def test_a_reason_that_passes_counts_as_no_failure(bench: Bench) -> None:
    bench.fail()
    bench.fail("Redis is away", passing=True)
    assert bench.loads.of("m")[0] == 0
    assert bench.tried_after() == pytest.approx(RETRY_S, abs=0.2)


def test_a_final_failure_waits_for_an_operator(bench: Bench) -> None:
    bench.fail(final=True)
    bench.now += 10 * FAILED_OFTEN_RETRY_S
    assert not bench.loads.any_due()


def test_a_lost_instance_is_loaded_again_soon_and_keeps_its_failures(bench: Bench) -> None:
    bench.fail()
    bench.loads.lost("m", "its server is gone")
    assert bench.loads.of("m")[0] == 1
    assert bench.tried_after() == pytest.approx(LOST_RETRY_S, abs=0.2)


def test_the_same_reason_again_is_repeated_whatever_its_numbers(bench: Bench) -> None:
    assert not bench.fail("it takes 600 bytes, and this worker has 400")
    assert bench.fail("it takes 600 bytes, and this worker has 380")
    assert not bench.fail("damaged")
    bench.loads.forget("m")
    assert not bench.fail("damaged")


def test_a_load_that_begins_before_its_time_is_not_tried_twice(bench: Bench) -> None:
    bench.fail()
    bench.loads.being_tried("m")
    bench.now += FAILED_RETRY_S
    assert not bench.loads.any_due()
    bench.fail()
    assert bench.loads.of("m")[0] == 2
