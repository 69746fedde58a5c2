"""Makes requests that arrive one by one wait for each other while the process is CPU-bound.

Protocols whose calls are tasks of the event loop bring one request per turn, not many as a socket does. Each request
would be a batch of its own, and the cost of a batch here, in Redis and in the worker would delay the next ones. While
the process is busy, requests wait until the in-flight count reaches its recent peak: then no further one is expected.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 0.002  # waiting requests leave after a step in which no request arrived
STEPS_MAX = 3  # waiting requests leave after this many steps
LOOK_S = 0.02  # least time over which the CPU use is measured
#: share of one core, used by all threads of the process: the event loop waits for threads of libraries, too
FULL = 0.75


class CpuPressure:
    """Tells whether this process is CPU-bound. Used in one thread. `spent`: returns its seconds of CPU time."""

    __slots__ = ("_at", "_full", "_spent", "_used")

    def __init__(self, spent: Callable[[], float] = time.process_time) -> None:
        self._full = False
        self._spent = spent
        self._used = spent()
        self._at = float("-inf")

    def full(self, now: float) -> bool:
        """Whether the process was busy in the last LOOK_S or so before `now`, on the monotonic clock."""
        past_s = now - self._at
        if past_s >= LOOK_S:
            used = self._spent()
            self._full = used - self._used > past_s * FULL
            self._at, self._used = now, used
        return self._full


class Coalescer:
    """For one lane. `on`: requests wait for each other; the lane sends none.

    Args:
        later: calls a function with an argument after some seconds.
        in_flight: returns the number of requests in flight in this process.
        dispatch: sends the waiting requests.
    """

    __slots__ = ("_dispatch", "_in_flight", "_last", "_later", "_left", "_number", "_peak", "on")

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
        self._last = 0
        self._left = 0
        self._number = 0

    def begin(self) -> None:
        """Hold requests until as many are in flight as recently, none arrived for STEP_S, or STEPS_MAX steps passed."""
        self.on = True
        self._number += 1
        self._left = STEPS_MAX
        self._last = 0
        self._later(STEP_S, self._check, self._number)
        self.joined()

    def joined(self) -> None:
        """Note that a request joined the waiting ones."""
        count = self._in_flight()
        if count > self._peak:
            self._peak = count
        elif count == self._peak:
            self._end()

    def _check(self, number: int) -> None:
        if number != self._number or not self.on:
            return
        count = self._in_flight()
        self._left -= 1
        if count > self._last and self._left:
            self._last = count
            self._later(STEP_S, self._check, number)
            return
        self._peak = count
        self._end()

    def _end(self) -> None:
        self.on = False
        self._dispatch()
