"""How long loops wait: delays after failures, ticks that loops share, and the time of a busy-poll.

Processes that lose the same server at the same instant would otherwise come back to it at the same instants: delays
double and are random. Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog (2015).
Waking a sleeping thread on an idle core takes longer than running a small model: after a short wait a process therefore
busy-polls briefly; after a long wait it blocks immediately.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from millstream.services.process.machine_share import cpus

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


async def next_tick(every_s: float) -> None:
    """Return at the next multiple of `every_s` on the monotonic clock. An idle process is woken once for all loops."""
    await asyncio.sleep(every_s - time.monotonic() % every_s)


#: A longer wait for work or a reply is not polled for: it costs a processor more than a wake-up would.
BUSY_POLL_S_MAX = 400e-6
LONE_MAX = 2  # requests; behind a larger batch the time of a wake-up does not matter


def busy_poll_s_max() -> float:
    """Return the longest busy-poll of this process: none on a single core, where the awaited process could not run."""
    return BUSY_POLL_S_MAX if cpus() > 1 else 0.0


class Spin:
    """Chooses the time to busy-poll from the last wait.

    Args:
        limit_s: the longest time to busy-poll; 0: never.
    """

    __slots__ = ("_last_s", "_limit_s")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last_s = float("inf")

    @property
    def seconds(self) -> float:
        """How long to busy-poll now."""
        return self._limit_s if self._last_s <= self._limit_s else 0.0

    def record_wait(self, seconds: float, requests: int) -> None:
        """Record how long the last wait took, and how many requests it returned."""
        self._last_s = seconds if requests <= LONE_MAX else float("inf")
