"""How long to wait before a child that died is started again. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

DELAY_S_MIN = 0.1
DELAY_S_MAX = 10.0
ALIVE_S_RESET = 30.0


@dataclass(slots=True)
class Backoff:
    """Doubles from 0.1 s to 10 s; a child that lived for 30 s starts over. `deaths`: in a row, since then."""

    deaths: int = 0

    def after_death(self, alive_s: float) -> float:
        """Seconds to wait, given how long the child lived."""
        self.deaths = 1 if alive_s >= ALIVE_S_RESET else self.deaths + 1
        return float(min(DELAY_S_MAX, DELAY_S_MIN * 2 ** min(self.deaths - 1, 10)))
