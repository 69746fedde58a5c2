"""Decides how long a process busy-polls before it blocks. Pure.

Waking a sleeping thread on an idle core takes longer than running a small model. After a short wait the process
therefore busy-polls briefly; after a long wait it blocks immediately.
"""

from __future__ import annotations

LONE_MAX = 2  # requests; behind a larger batch the time of a wake-up does not matter


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
