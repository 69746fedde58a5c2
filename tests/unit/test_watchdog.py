"""When a run's time is over, what happens first, and to whom. The clock is moved by moving when a run began."""

from __future__ import annotations

import time
from dataclasses import replace

from millstream.services.errors import Code
from millstream.services.queue.clock import RedisClock
from millstream.services.wire.batch import ENDLESS
from millstream.workers.batches.lease import Lease
from millstream.workers.batches.watchdog import GRACE_S, SUSPICIOUS_RUNS, SUSPICIOUS_S, UNMEASURED_S, Guarded, Watchdog
from tests.unit.test_runner import holding, lease, signature


class Told:
    """Which calls a watchdog made."""

    def __init__(self, run_s_max: float = 600.0) -> None:
        self.said: list[str] = []
        self.watchdog = Watchdog(
            RedisClock(),
            run_s_max,
            lambda _: self.said.append("long"),
            lambda _: self.said.append("stuck"),
            on_look=lambda: self.said.append("look"),
        )

    def terminate(self) -> None:
        self.said.append("terminate")

    def look(self, guarded: Guarded) -> list[str]:
        """What it did at this look."""
        self.said.clear()
        self.watchdog._check(guarded, time.monotonic())
        return list(self.said)

    def arm(self, *leases: Lease, measured_s: float = 0.001, left_s: float = 1e6) -> Guarded:
        for one in leases:
            one.header.deadlines_ms[:] = [(time.time() + left_s) * 1000] * len(one.header.deadlines_ms)
        held = replace(holding(None, signature()), instance=self, measured={64: measured_s})  # type: ignore[arg-type]
        return self.watchdog.arm(list(leases), held)


def passed(guarded: Guarded, seconds: float) -> None:
    guarded.began -= seconds
    if guarded.until:
        guarded.until -= seconds
        guarded.terminated_at -= seconds


def test_a_run_within_its_time_is_left_alone() -> None:
    told = Told()
    guarded = told.arm(lease([1]))
    assert told.look(guarded) == []
    passed(guarded, SUSPICIOUS_S / 2)
    assert told.look(guarded) == []


def test_a_lone_request_runs_until_its_deadline() -> None:
    told = Told()
    guarded = told.arm(lease([1]), left_s=30)
    assert told.look(guarded) == []
    passed(guarded, 29)
    assert told.look(guarded) == ["long"], "what waits behind it goes to others, once"
    assert told.look(guarded) == []
    passed(guarded, 1.1)
    assert told.look(guarded) == ["terminate"]
    assert told.look(guarded) == []
    assert guarded.error()[0] == ENDLESS
    passed(guarded, GRACE_S + 0.1)
    told.watchdog._guarded = guarded
    assert told.look(guarded) == ["stuck"]


def test_several_requests_run_as_long_as_any_run_should() -> None:
    for together in ((lease([1], [2]),), (lease([1]), lease([2]))):
        told = Told()
        guarded = told.arm(*together, measured_s=1.0)
        assert told.look(guarded) == []
        passed(guarded, SUSPICIOUS_RUNS - 1)
        assert told.look(guarded) == []
        passed(guarded, 1.1)
        assert told.look(guarded) == ["long", "terminate"]
        assert not guarded.alone


def test_no_process_ends_for_a_short_deadline() -> None:
    told = Told()
    guarded = told.arm(lease([1]), left_s=0, measured_s=8.0)
    told.look(guarded)
    passed(guarded, 0.1)
    assert told.look(guarded) == ["terminate"]
    assert guarded.error() == (
        Code.EXPIRED,
        "the deadline passed before the model answered, and its run was terminated",
    )
    told.watchdog._guarded = guarded
    passed(guarded, GRACE_S + 1)
    assert told.look(guarded) == [], "it takes eight seconds, and nothing can make it shorter"
    passed(guarded, 8 * SUSPICIOUS_RUNS)
    assert told.look(guarded) == ["long", "stuck"]


def test_the_limit_of_a_run_is_nobodys_deadline() -> None:
    told = Told(run_s_max=3)
    guarded = told.arm(lease([1]), measured_s=1.0)
    assert told.look(guarded) == []
    passed(guarded, 3.1)
    assert told.look(guarded) == ["terminate"]
    code, message = guarded.error()
    assert code == Code.MODEL
    assert "longer than 3 s" in message


def test_what_was_never_measured_has_more_time() -> None:
    told = Told()
    guarded = told.arm(lease([1]), measured_s=0.0)
    guarded.compute_limits(600, time.time() * 1000)
    assert guarded.suspicious_s == UNMEASURED_S


def test_a_run_that_ended_meanwhile_ends_no_process() -> None:
    told = Told()
    guarded = told.arm(lease([1]), left_s=1)
    told.look(guarded)
    passed(guarded, 100)
    told.look(guarded)
    told.watchdog.disarm()
    passed(guarded, 100)
    assert told.look(guarded) == []


def test_each_look_reports_also_between_two_runs() -> None:
    told = Told()
    told.watchdog._look()
    assert told.said == ["look"]
    guarded = told.arm(lease([1]))
    passed(guarded, UNMEASURED_S + 1)
    told.watchdog._look()
    assert told.said == ["look", "long", "look"]
