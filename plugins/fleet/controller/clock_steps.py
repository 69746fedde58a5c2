"""clock_steps: notices that the Redis clock was set, to which instants of workers and of the controller refer. Pure."""

from __future__ import annotations

#: A step is at least this large; smaller ones change no decision, and drift of the clocks takes hours for it.
STEP_S_MIN = 1.0
#: After a step, the time in which workers publish their instants anew: their record is read after two heartbeats.
SETTLE_S = 3.0


class ClockSteps:
    """Compares the Redis clock with the monotonic clock. All instants are in seconds."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None  # the Redis clock minus the monotonic clock
        self._settled_at = 0.0

    def observe(self, now: float, monotonic: float) -> float:
        """Return by how much the Redis clock was set since the last call; 0: it was not."""
        before, self._ahead_s = self._ahead_s, now - monotonic
        step_s = 0.0 if before is None else self._ahead_s - before
        if abs(step_s) < STEP_S_MIN:
            return 0.0
        self._settled_at = monotonic + SETTLE_S
        return step_s

    def is_settled(self, monotonic: float) -> bool:
        """Return whether all instants that workers publish are of the clock as it is now."""
        return monotonic >= self._settled_at
