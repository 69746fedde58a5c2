"""How long a process looks for what it waits for before it sleeps. Pure.

Who sleeps must be woken, and on an idle core that takes longer than a small model runs. So where the last wait was short
one looks for a moment before one sleeps; where it was long one sleeps at once, which costs nothing.
"""

from __future__ import annotations

LONE_MAX = 2


class Spin:
    """`limit_s`: at most so long; 0: never."""

    __slots__ = ("_last_s", "_limit_s")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._last_s = float("inf")

    @property
    def seconds(self) -> float:
        """How long to look now."""
        return self._limit_s if self._last_s <= self._limit_s else 0.0

    def waited(self, seconds: float, requests: int) -> None:
        """So long the last wait took, and so many requests came of it. Behind a full batch nobody feels a wake-up."""
        self._last_s = seconds if requests <= LONE_MAX else float("inf")
