"""Which idle models are probed when not all fit into a round, and which of them count as answering meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.gateway.connection.drain import Drain
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.readiness import (
    EVERY_S,
    FRESH_S,
    HASTY_ROUND_MAX,
    ROUND_MAX,
    Preloads,
    ReadinessProbe,
)
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.signature import Signature


@dataclass(eq=False)
class IdleLane:
    """What the probe reads of a lane that no request comes for."""

    content_id: str
    answers: bool = True
    state: Any = field(
        default_factory=lambda: SimpleNamespace(replied_at=0.0, loaded_at=0.0, standby=False, failed=None)
    )
    policy: Any = field(default_factory=lambda: SimpleNamespace(run_s=lambda _rows: 0.001))
    ready: bool = True
    circuit: Any = field(default_factory=lambda: SimpleNamespace(open_until=0.0))
    manifest: Any = field(
        default_factory=lambda: SimpleNamespace(signature=Signature(inputs=(), outputs=(), batching=True))
    )


class Rounds:
    """Rounds of a probe whose replies come at once, from the lanes that answer."""

    def __init__(self, lanes: list[IdleLane]) -> None:
        self.now = 1000.0
        self.lanes = lanes
        of_probe = cast("list[Lane]", lanes)
        self.probe = ReadinessProbe(
            lambda: of_probe, lambda: True, lambda: 1, Drain(), Preloads(), MetricsRegistry(None, "test"), self.clock
        )

    def clock(self) -> float:
        return self.now

    def run(self) -> list[IdleLane]:
        """Run one round, and return the lanes that it probed."""
        due = cast("list[IdleLane]", self.probe._due(cast("list[Lane]", self.lanes)))
        for lane in due:
            if lane.answers:
                lane.state.replied_at = self.now
        self.now += EVERY_S
        return due

    def answering(self) -> int:
        return sum(self.probe.answering(lane.content_id) for lane in self.lanes if lane.answers)


def lanes(count: int, *, silent: int = 0) -> list[IdleLane]:
    return [IdleLane(f"lane{number}", answers=number >= silent) for number in range(count)]


def test_lanes_that_never_answer_keep_no_other_from_being_probed():
    for silent in (ROUND_MAX, HASTY_ROUND_MAX, 3 * HASTY_ROUND_MAX):
        rounds = Rounds(lanes(silent + 40, silent=silent))
        for _ in range(100):
            rounds.run()
        assert rounds.answering() == 40
        assert rounds.probe.ready()


def test_all_lanes_take_turns_and_count_as_answering_between_them():
    rounds = Rounds(lanes(200))
    for _ in range(200 // HASTY_ROUND_MAX + 1):
        rounds.run()
    for _ in range(200):
        assert len(rounds.run()) == ROUND_MAX
        assert rounds.answering() == 200


def test_after_a_start_more_lanes_are_probed_in_a_round():
    rounds = Rounds(lanes(200))
    probed = [len(rounds.run()) for _ in range(20)]
    assert probed[: 200 // HASTY_ROUND_MAX] == [HASTY_ROUND_MAX] * (200 // HASTY_ROUND_MAX)
    assert probed[-1] == ROUND_MAX


def test_a_lane_with_long_runs_is_probed_seldom_and_delays_no_other():
    slow = IdleLane("slow", policy=SimpleNamespace(run_s=lambda _rows: 10.0))
    slow.state.replied_at = 999.0
    rounds = Rounds([slow, *lanes(10)])
    for _ in range(20):
        assert slow not in rounds.run()
        assert rounds.answering() == 11


@pytest.mark.parametrize("replied_at", [0.0, 10.0], ids=["for the first time", "again"])
def test_what_was_just_loaded_and_warmed_up_needs_no_probe_to_be_ready(replied_at: float) -> None:
    """The only version became another one, or was on standby: a load that was answered is to be seen at once."""
    lane = IdleLane("new", answers=False)
    lane.state.replied_at = replied_at
    rounds = Rounds([lane])
    assert not rounds.probe.ready()
    lane.state.loaded_at = rounds.now
    assert rounds.probe.ready()
    assert rounds.probe.answering("new")
    rounds.now += FRESH_S + EVERY_S
    assert not rounds.probe.ready(), "a worker that answers nothing after its load is none"
