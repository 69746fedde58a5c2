"""Tells of pools whose workers also run elsewhere: each `millstream up` would start all workers that are wanted. Pure.

decision: workers ready ─┐
workers of this machine ─┴─> more are ready than run here, for ELSEWHERE_S ─> one line, once for each pool
"""

from __future__ import annotations

from collections.abc import Callable

ELSEWHERE_S = 30.0  # the record of a worker that was killed may outlive it, but not for so long


class OtherWorkers:
    """What is known of workers elsewhere. `show`: shows a line to the operator."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def look(self, pool: str, ready: int, here: int, now: float) -> None:
        """Compare a pool's workers: those that are ready anywhere, and those that run `here`, ending ones included."""
        if ready <= here:
            self._since.pop(pool, None)
            return
        if now - self._since.setdefault(pool, now) >= ELSEWHERE_S and pool not in self._told:
            self._told.add(pool)
            self._show(
                f"pool {pool}: {ready - here} of its workers run elsewhere, and each `millstream up` that scales it "
                "starts all that are wanted: give each machine a pool name of its own, or fixed sizes"
            )
