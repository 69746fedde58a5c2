"""Makes requests that arrive one by one wait for each other while the process is CPU-bound.

Protocols whose calls are tasks of the event loop bring one request per turn, not many as a socket does. Each request
would be a batch of its own, and the cost of a batch here, in Redis and in the worker would delay the next ones. While
the process is busy, requests wait until the in-flight count reaches its recent peak: then no more are expected.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 0.002  # waiting requests leave after a step in which no request arrived
STEPS_MAX = 3  # waiting requests leave after this many steps
MEASURE_S_MIN = 0.02  # least time over which the CPU use is measured
#: share of one core from which the process is busy. The threads of libraries count, since the event loop waits for them
BUSY_SHARE = 0.75


class CpuPressure:
    """Tells whether this process is CPU-bound. Use it in one thread. `cpu_s` returns the CPU seconds of the process."""

    __slots__ = ("_busy", "_cpu_s", "_used", "_used_at")

    def __init__(self, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._busy = False
        self._cpu_s = cpu_s
        self._used = cpu_s()
        self._used_at = float("-inf")

    def full(self, now: float) -> bool:
        """Whether the process was busy in about the last MEASURE_S_MIN before `now`, on the monotonic clock."""
        past_s = now - self._used_at
        if past_s >= MEASURE_S_MIN:
            used = self._cpu_s()
            self._busy = used - self._used > past_s * BUSY_SHARE
            self._used_at, self._used = now, used
        return self._busy


class Coalescer:
    """The coalescing of one lane. `on`: requests wait for each other, and the lane sends none.

    Args:
        later: schedules a function and its argument after some seconds.
        in_flight: returns the number of requests in flight in this process.
        dispatch: sends the waiting requests.
    """

    __slots__ = ("_dispatch", "_in_flight", "_last_count", "_later", "_peak", "_round", "_steps_left", "on")

    def __init__(
        self,
        later: Callable[[float, Callable[[int], None], int], object],
        in_flight: Callable[[], int],
        dispatch: Callable[[], object],
    ) -> None:
        self.on = False
        self._later = later
        self._in_flight = in_flight
        self._dispatch = dispatch
        self._peak = 0  # recent peak of requests in flight
        self._last_count = 0
        self._steps_left = 0
        self._round = 0

    def begin(self) -> None:
        """Delay requests until the recent peak is reached, none arrived for STEP_S, or STEPS_MAX steps passed."""
        self.on = True
        self._round += 1
        self._steps_left = STEPS_MAX
        self._last_count = 0
        self._later(STEP_S, self._check, self._round)
        self.joined()

    def joined(self) -> None:
        """Count a request that joined the waiting requests."""
        count = self._in_flight()
        if count > self._peak:
            self._peak = count
        elif count == self._peak:
            self._end()

    def _check(self, number: int) -> None:
        if number != self._round or not self.on:
            return
        count = self._in_flight()
        self._steps_left -= 1
        if count > self._last_count and self._steps_left:
            self._last_count = count
            self._later(STEP_S, self._check, number)
            return
        self._peak = count
        self._end()

    def _end(self) -> None:
        self.on = False
        self._dispatch()
