"""How long a worker looks for work before it sleeps. Pure.

Whoever sleeps must be woken, and on an idle core that takes longer than a small model runs. So a worker whose last wait
was short looks for a moment before it sleeps again; one whose work is rare sleeps at once and costs nothing.
"""

from __future__ import annotations


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

    def waited(self, seconds: float) -> None:
        """So long the last wait took, whether it brought work or not."""
        self._last_s = seconds
