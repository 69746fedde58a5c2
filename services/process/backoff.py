"""Exponential back-off between attempts. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Doubles the delay from `delay_s_min` to `delay_s_max`. The defaults are for restarting a process."""

    delay_s_min: float = 0.1
    delay_s_max: float = 10.0
    alive_s_reset: float = 30.0  # after living this long, the delay starts from its minimum again
    deaths: int = 0  # in a row

    def after_death(self, alive_s: float = 0.0) -> float:
        """Return the seconds to wait after a process or connection that lived for `alive_s`; 0: it did not start."""
        self.deaths = 1 if alive_s >= self.alive_s_reset else self.deaths + 1
        return float(min(self.delay_s_max, self.delay_s_min * 2 ** min(self.deaths - 1, 10)))
