"""When a run's time is over, what happens first, and to whom. The clock is moved by moving when a run began."""

from __future__ import annotations

import time
from dataclasses import replace

from millstream.services.errors import Code
from millstream.services.model.manifest import ModelConfig
from millstream.services.queue.pipeline import RedisClock
from millstream.workers.batches.lease import Lease
from millstream.workers.batches.watchdog import (
    FIRST_S_MIN,
    GRACE_S,
    MEASURED_S_MIN,
    SUSPICIOUS_RUNS,
    UNMEASURED_S,
    USUAL_S_MIN,
    Guarded,
    LoopState,
    Watchdog,
)
from millstream.workers.models.usage_log import RUNS_MIN, Calls
from tests.unit.test_runner import holding, lease, signature


class Told:
    """Which calls a watchdog made."""

    def __init__(self, run_s_max: float = 600.0) -> None:
        self.said: list[str] = []
        self.loop = LoopState()
        self.watchdog = Watchdog(
            self.loop,
            RedisClock(),
            run_s_max,
            lambda _: self.said.append("long"),
            lambda _: self.said.append("stuck"),
            on_look=[lambda _: self.said.append("look")],
        )

    def terminate(self) -> None:
        self.said.append("terminate")

    def look(self, guarded: Guarded) -> list[str]:
        """What it did at this look."""
        self.said.clear()
        self.watchdog._check(guarded, time.monotonic())
        return list(self.said)

    def arm(
        self, *leases: Lease, measured_s: float = 0.001, left_s: float = 1e6, usual_s: float = 0, **config: float
    ) -> Guarded:
        """Arm it; `usual_s`: what runs of this size took before, if it is known."""
        for one in leases:
            one.header.deadlines_ms[:] = [(time.time() + left_s) * 1000] * len(one.header.deadlines_ms)
        held = replace(holding(None, signature()), instance=self, measured={64: measured_s})  # type: ignore[arg-type]
        manifest = held.manifest.model_copy(update={"config": ModelConfig(**config)})
        guarded = self.loop.arm(list(leases), replace(held, manifest=manifest, calls=Calls()))
        for _ in range(RUNS_MIN if usual_s else 0):
            guarded.model.calls.history.add(guarded.input_bytes, usual_s)
        return guarded


def passed(guarded: Guarded, seconds: float) -> None:
    guarded.began -= seconds
    if guarded.until:
        guarded.until -= seconds
        guarded.until_limit -= seconds
        guarded.terminated_at -= seconds


def test_a_run_within_its_time_is_left_alone() -> None:
    told = Told()
    guarded = told.arm(lease([1]))
    assert told.look(guarded) == []
    passed(guarded, MEASURED_S_MIN / 2)
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
    assert guarded.error is not None
    assert guarded.error[0] == Code.EXPIRED
    assert guarded.suspicious
    passed(guarded, GRACE_S + 0.1)
    told.loop.current = guarded
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
    assert guarded.error == (
        Code.EXPIRED,
        "the deadline passed before the model answered, and its run was terminated",
    )
    told.loop.current = guarded
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
    assert guarded.error is not None
    code, message = guarded.error
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
    told.loop.disarm()
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


def test_what_is_far_longer_than_usual_is_ended_while_others_wait() -> None:
    told = Told()
    guarded = told.arm(lease([1]), measured_s=9.0, usual_s=0.004)
    assert told.look(guarded) == []
    guarded.others_wait = True
    passed(guarded, USUAL_S_MIN / 2)
    assert told.look(guarded) == []
    passed(guarded, USUAL_S_MIN)
    guarded.others_wait = False
    assert told.look(guarded) == ["long"], "it takes nothing from anybody"
    guarded.others_wait = True
    assert told.look(guarded) == ["terminate"]
    assert guarded.error is not None
    assert "far longer than runs of this size usually take" in guarded.error[1]


def test_what_is_usual_for_a_slow_version_is_twenty_times_its_longest_runs() -> None:
    told = Told()
    guarded = told.arm(lease([1]), measured_s=0.001, usual_s=1.0)
    guarded.others_wait = True
    assert told.look(guarded) == []
    passed(guarded, SUSPICIOUS_RUNS - 1)
    assert told.look(guarded) == []
    passed(guarded, 0.2 * SUSPICIOUS_RUNS)
    assert told.look(guarded) == ["long", "terminate"]


def test_what_others_called_does_not_wait_behind_a_long_run() -> None:
    told = Told()
    guarded = told.arm(lease([1]), measured_s=9.0)
    told.look(guarded)
    guarded.others_wait = guarded.blocks = True
    assert told.look(guarded) == ["long"]
    assert told.look(guarded) == []


def test_without_runs_of_its_size_the_warm_up_bounds_a_run_while_others_wait() -> None:
    told = Told()
    guarded = told.arm(lease([1]), measured_s=0.001)
    for _ in range(RUNS_MIN):
        guarded.model.calls.history.add(guarded.input_bytes * 16, 0.001)
    guarded.others_wait = True
    told.look(guarded)
    passed(guarded, MEASURED_S_MIN + 1)
    assert told.look(guarded) == ["long"], "other sizes say nothing, and inputs may take longer than zeros"
    passed(guarded, FIRST_S_MIN - MEASURED_S_MIN)
    assert told.look(guarded) == ["terminate"]
    assert guarded.error is not None
    assert "far longer than the warm-up" in guarded.error[1]


def test_a_first_run_of_more_rows_than_the_warm_up_had_may_take_longer_by_them() -> None:
    told = Told()
    guarded = told.arm(lease([1] * 128), measured_s=1.0)  # 64 rows
    guarded.others_wait = True
    told.look(guarded)
    passed(guarded, 2 * SUSPICIOUS_RUNS - 1)
    assert told.look(guarded) == []
    passed(guarded, 1.1)
    assert told.look(guarded) == ["long", "terminate"]


def test_what_an_ended_run_took_from_others_is_the_time_for_which_they_waited() -> None:
    told = Told()
    guarded = told.arm(lease([1]), measured_s=0.001)
    guarded.others_wait, guarded.waited_s = True, 3.0
    told.look(guarded)
    passed(guarded, FIRST_S_MIN + 0.1)
    assert guarded.lost_s == 0, "it goes on"
    told.look(guarded)
    assert guarded.lost_s == 3.0


def test_a_version_can_have_a_limit_of_its_own() -> None:
    told = Told()
    guarded = told.arm(lease([1]), usual_s=0.001, run_ms_max=5000)
    guarded.others_wait = True
    told.look(guarded)
    passed(guarded, 4)
    assert told.look(guarded) == ["long"]
    passed(guarded, 1.1)
    assert told.look(guarded) == ["terminate"]
    assert guarded.error is not None
    assert "longer than 5 s" in guarded.error[1]
