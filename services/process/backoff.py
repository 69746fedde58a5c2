"""How long to wait before what failed is tried again. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Doubles from `delay_s_min` to `delay_s_max`; what lived for `alive_s_reset` starts over.

    `deaths`: in a row, since then. The defaults are those of a process that is started again.
    """

    delay_s_min: float = 0.1
    delay_s_max: float = 10.0
    alive_s_reset: float = 30.0
    deaths: int = 0

    def after_death(self, alive_s: float = 0.0) -> float:
        """Seconds to wait, given how long it lived; 0: it could not be begun."""
        self.deaths = 1 if alive_s >= self.alive_s_reset else self.deaths + 1
        return float(min(self.delay_s_max, self.delay_s_min * 2 ** min(self.deaths - 1, 10)))
