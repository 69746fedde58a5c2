"""Whether several lanes of a pool are in use, as seen from this gateway: then none may keep a worker for long. Pure."""

from __future__ import annotations

SEVERAL_S = 1.0  # for so long after its last batch a lane is in use


class Contention:
    """Instants are seconds of one clock."""

    __slots__ = ("_last", "_last_at", "_other_at")

    def __init__(self) -> None:
        self._last: object = None  # the lane that put last
        self._last_at = float("-inf")
        self._other_at = float("-inf")  # when another one did

    def put(self, lane: object, now: float) -> None:
        """A lane put a batch."""
        if lane is not self._last:
            self._last, self._other_at = lane, self._last_at
        self._last_at = now

    def beside(self, lane: object, now: float) -> bool:
        """Whether another lane than this one is in use."""
        at = self._other_at if lane is self._last else self._last_at
        return now - at < SEVERAL_S
