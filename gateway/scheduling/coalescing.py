"""coalescing: requests that come one by one wait for each other, while the process has its hands full anyway.

Protocols whose calls are tasks of the event loop bring one request a turn, not many as a socket does. Each would leave in a
batch of its own, and what a batch costs here, in Redis and in the worker would keep the next ones from being read. So while
the process is busy they wait until as many are in flight as there were of late: then nobody else is going to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_S = 0.002  # nobody came for so long: those who wait leave
STEPS_MAX = 3
LOOK_S = 0.02
#: of one core, by all threads of the process: libraries have threads that the event loop waits for
FULL = 0.75


class CpuPressure:
    """Whether this process has hardly a pause. `spent`: seconds of CPU that it has used. Asked in one thread."""

    __slots__ = ("_at", "_full", "_spent", "_used")

    def __init__(self, spent: Callable[[], float] = time.process_time) -> None:
        self._full = False
        self._spent = spent
        self._used = spent()
        self._at = float("-inf")

    def full(self, now: float) -> bool:
        """As of the last LOOK_S or so before `now`, on the monotonic clock."""
        past_s = now - self._at
        if past_s >= LOOK_S:
            used = self._spent()
            self._full = used - self._used > past_s * FULL
            self._at, self._used = now, used
        return self._full


class Coalescer:
    """Of one lane. `in_flight`: requests of the process; `release`: called when those that wait shall leave."""

    __slots__ = ("_in_flight", "_last", "_later", "_left", "_most", "_number", "_release", "on")

    def __init__(
        self,
        later: Callable[[float, Callable[[int], None], int], object],
        in_flight: Callable[[], int],
        release: Callable[[], object],
    ) -> None:
        self.on = False
        self._later = later
        self._in_flight = in_flight
        self._release = release
        self._most = 0  # in flight, of late
        self._last = 0
        self._left = 0
        self._number = 0

    def begin(self) -> None:
        """Hold back until all are here that were of late, until nobody came for STEP_S, or for STEPS_MAX of them."""
        self.on = True
        self._number += 1
        self._left = STEPS_MAX
        self._last = 0
        self._later(STEP_S, self._look, self._number)
        self.joined()

    def joined(self) -> None:
        """One more is here."""
        count = self._in_flight()
        if count > self._most:
            self._most = count
        elif count == self._most:
            self._end()

    def _look(self, number: int) -> None:
        if number != self._number or not self.on:
            return
        count = self._in_flight()
        self._left -= 1
        if count > self._last and self._left:
            self._last = count
            self._later(STEP_S, self._look, number)
            return
        self._most = count
        self._end()

    def _end(self) -> None:
        self.on = False
        self._release()
