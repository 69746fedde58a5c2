"""The delays between attempts, which double and are random. Pure: time is passed in, random numbers can be.

Processes that lose the same server at the same instant would otherwise come back to it at the same instants. Source:
M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog (2015): this is its "equal jitter".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

#: Returns a random number from 0 up to 1.
Draw = Callable[[], float]
_DOUBLINGS_MAX = 10


def with_jitter(delay_s: float, draw: Draw = random.random) -> float:
    """Return a random delay, at least half of `delay_s` and at most `delay_s`."""
    return delay_s * (1 + draw()) / 2


def backoff_s(attempt: int, delay_s_min: float, delay_s_max: float, draw: Draw = random.random) -> float:
    """Return the seconds to wait after a failed attempt: `delay_s_min` after attempt 1, doubled each time; jittered."""
    return with_jitter(min(delay_s_max, delay_s_min * 2.0 ** min(attempt - 1, _DOUBLINGS_MAX)), draw)


@dataclass(slots=True)
class Backoff:
    """Doubles the delay from `delay_s_min` to `delay_s_max`. The defaults are for restarting a process."""

    delay_s_min: float = 0.1
    delay_s_max: float = 10.0
    alive_s_reset: float = 30.0  # after living this long, the delay starts from its minimum again
    draw: Draw = random.random
    deaths: int = 0  # in a row

    def after_death(self, alive_s: float = 0.0) -> float:
        """Return the seconds to wait after a process or connection that lived for `alive_s`; 0: it did not start."""
        self.deaths = 1 if alive_s >= self.alive_s_reset else self.deaths + 1
        return backoff_s(self.deaths, self.delay_s_min, self.delay_s_max, self.draw)
