"""Requests that come one by one wait for each other while the process is busy, and only for those that will come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from millstream.gateway.scheduling.batching.coalescing import (
    BUSY_SHARE,
    MEASURE_S_MIN,
    STEP_S,
    STEPS_MAX,
    Coalescer,
    CpuPressure,
)
from tests.kit.lane_harness import LaneBench


class Busy(CpuPressure):
    """A process that never pauses."""

    def full(self, now: float) -> bool:
        return True


class Room:
    """A gathering, and what it knows: how many are in flight, and a clock."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.released: list[int] = []
        self.timers: list[tuple[object, int]] = []
        self.gathering = Coalescer(
            lambda _, call, number: self.timers.append((call, number)),
            lambda: self.in_flight,
            lambda: self.released.append(self.in_flight),
        )

    def come(self, count: int = 1) -> None:
        for _ in range(count):
            self.in_flight += 1
            if self.gathering.on:
                self.gathering.joined()
            else:
                self.gathering.begin()

    def step(self) -> None:
        timers, self.timers = self.timers, []
        for call, number in timers:
            call(number)  # type: ignore[operator]


def test_they_leave_when_nobody_came_for_a_step() -> None:
    room = Room()
    room.come(3)
    room.step()
    assert room.released == []  # a call arrived since it began
    room.step()
    assert room.released == [3]
    assert not room.gathering.on


def test_they_leave_at_once_when_all_are_here_that_were_of_late() -> None:
    room = Room()
    room.come(3)
    room.step()
    room.step()
    room.in_flight = 1  # two were answered
    room.come(1)
    assert room.released == [3]
    room.come(1)
    assert room.released == [3, 3]
    room.step()  # the timer of what is over
    assert room.released == [3, 3]


def test_they_wait_for_no_more_than_some_steps() -> None:
    room = Room()
    for _ in range(STEPS_MAX):
        room.come(2)
        assert room.released == []
        room.step()
    assert room.released == [2 * STEPS_MAX]


def test_callers_that_went_away_are_waited_for_once() -> None:
    room = Room()
    room.come(9)
    room.step()
    room.step()
    room.in_flight = 0
    room.come(2)
    room.step()
    room.step()
    assert room.released == [9, 2]
    room.in_flight = 0
    room.come(2)
    assert room.released == [9, 2, 2]


def test_a_lane_holds_back_only_what_comes_alone_to_a_busy_process(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, {1: 0.0001, 16: 0.0001})
    for alone in (False, True):  # a process with pauses
        bench.lane.add(bench.request(), 16, single=alone)
        bench.turn()
        bench.answer()
    bench.shared = replace(bench.shared, pressure=Busy())
    lane = bench.another("busy", {1: 0.0001, 16: 0.0001})
    lane.add(bench.request(), 16)
    bench.turn()
    assert bench.put == [1]
    bench.answer()
    for _ in range(3):
        lane.add(bench.request(), 16, single=True)
        bench.turn()
    assert bench.put == []
    for _ in range(2):
        timers, bench.timers = bench.timers, []
        for _, call, number in timers:
            call(number)
    bench.turn()
    assert bench.put == [3]
    bench.answer()
    assert lane.idle


def test_pressure_is_the_share_of_a_core() -> None:
    spent = 0.0
    pressure = CpuPressure(lambda: spent)
    pressure.full(0.0)
    assert STEP_S < MEASURE_S_MIN
    for share, full in ((BUSY_SHARE / 2, False), (BUSY_SHARE * 1.1, True), (BUSY_SHARE * 1.9, True), (0.0, False)):
        began = pressure._used_at
        spent += share * MEASURE_S_MIN
        assert pressure.full(began + MEASURE_S_MIN) is full
        assert pressure.full(began + MEASURE_S_MIN * 1.5) is full  # not looked at again
