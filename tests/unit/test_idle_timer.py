"""A timer that is moved far more often than it fires, over a clock that the test turns."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

from millstream.gateway.connection.bounded_protocol import LazyTimer


class Clock:
    """The part of an event loop that a timer needs.

    Knows the time and what is due when. `asked`: how many times it was asked to call.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = 0
        self.calls: list[tuple[float, asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        self.asked += 1
        handle = asyncio.TimerHandle(self.now + delay, callback, args, cast("Any", self), context)
        self.calls.append((self.now + delay, handle))
        return handle

    def turn(self, seconds: float) -> None:
        """Let time pass and call what became due."""
        self.now += seconds
        due = [call for call in self.calls if call[0] <= self.now]
        self.calls = [call for call in self.calls if call[0] > self.now]
        for _, handle in due:
            if not handle.cancelled():
                handle._run()


def made() -> tuple[Clock, list[float], LazyTimer]:
    clock, fired = Clock(), []
    return clock, fired, LazyTimer(cast("Any", clock), lambda: fired.append(clock.now))


def test_it_fires_once_when_it_is_due():
    clock, fired, timer = made()
    timer.set(5)
    clock.turn(4)
    assert fired == []
    clock.turn(1)
    clock.turn(100)
    assert fired == [105]
    timer.set(1)
    clock.turn(1)
    assert len(fired) == 2


def test_moving_it_asks_the_loop_hardly_ever():
    clock, fired, timer = made()
    for _ in range(1000):
        timer.set(5)
        timer.unset()
        clock.turn(0.01)
    assert clock.asked <= 3
    timer.set(5)
    clock.turn(4.99)
    assert fired == []
    clock.turn(0.02)
    assert len(fired) == 1


def test_it_may_be_moved_to_an_earlier_time():
    clock, fired, timer = made()
    timer.set(60)
    timer.set(1)
    clock.turn(1)
    assert fired == [101]


def test_unset_it_never_fires():
    clock, fired, timer = made()
    timer.set(1)
    timer.unset()
    clock.turn(10)
    assert (fired, clock.calls) == ([], [])


def test_closed_it_holds_on_to_nothing():
    class Owner:
        def __init__(self) -> None:
            self.timer = LazyTimer(cast("Any", clock), self.due)

        def due(self) -> None:
            raise AssertionError

    clock = Clock()
    owner = Owner()
    owner.timer.set(1)
    owner.timer.close()
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
    clock.turn(10)
