"""Tells whether other lanes of a pool are in use, as far as this gateway sees: then runs must be short. Pure."""

from __future__ import annotations

IN_USE_S = 1.0  # a lane counts as in use for this long after its last batch


class Contention:
    """Which lanes of one pool are in use. Instants are seconds on one clock."""

    __slots__ = ("_last", "_last_at", "_other_at")

    def __init__(self) -> None:
        self._last: object = None  # the lane that put last
        self._last_at = float("-inf")
        self._other_at = float("-inf")  # when another lane put its last batch

    def put(self, lane: object, now: float) -> None:
        """Record that a lane put a batch."""
        if lane is not self._last:
            self._last, self._other_at = lane, self._last_at
        self._last_at = now

    def others_active(self, lane: object, now: float) -> bool:
        """Whether a lane other than `lane` is in use."""
        at = self._other_at if lane is self._last else self._last_at
        return now - at < IN_USE_S
