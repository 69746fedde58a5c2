"""run_time: how long runs took, for Redis, which shares the workers by measured time.

main loop: add(run that ended) ─> take(), with the next call of the queue
The lane of a batch from the queue was charged for the expected time when it was leased. Only the rest is told.
"""

from __future__ import annotations

import time

from millstream.services.queue.sharing import LONG_S, long_life_ms
from millstream.workers.batches.watchdog import Guarded

TELL_S = 0.5  # longest time until Redis is told of short runs
EXCESS_S_MIN = 0.01  # shorter runs from the queue count as taking what was expected
LANES_MAX = 64  # lanes of which one call tells: those with long runs, then those with the most run time


class RunTime:
    """The run time of ended runs that Redis does not know of yet. Used by the main loop."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._longest: dict[str, float] = {}  # seconds of the longest run of lanes that had a long one
        self._due = 0.0  # monotonic

    def add(self, guarded: Guarded, seconds: float) -> None:
        """Record a run that took `seconds`. Short runs of readiness probes do not count: their lanes are not called."""
        first = guarded.group[0]
        lane, known = first.lane, seconds  # of which Redis knows
        if first.header.probe and seconds < LONG_S:
            return
        if guarded.direct or seconds >= EXCESS_S_MIN:
            known = guarded.expected_s + guarded.reported_s
        if seconds >= LONG_S:
            self._longest[lane] = max(seconds, self._longest.get(lane, 0.0))
            self._due = 0.0
        self._seconds[lane] = self._seconds.get(lane, 0.0) + max(0.0, seconds - known)

    def take(self) -> list[bytes | str]:
        """Return what `Consumer.send_next` tells, in triples: lane, run time, how long it counts as long; in ms."""
        if not self._seconds or (now := time.monotonic()) < self._due:
            return []
        self._due = now + TELL_S
        words: list[bytes | str] = []
        longest = self._longest
        lanes = sorted(self._seconds, key=lambda lane: (longest.get(lane, 0.0), self._seconds[lane]))
        for lane in lanes[-LANES_MAX:]:
            long_ms = long_life_ms(longest.get(lane, 0.0))
            words += (lane, b"%.3f" % (self._seconds[lane] * 1000), b"%d" % long_ms)
        self._seconds.clear()
        longest.clear()
        return words
