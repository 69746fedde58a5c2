"""Learns for how long a pool is to keep workers that bursts need again at regular intervals. Pure.

shrank (the pool gives workers up) ─> grew (it wants them again): a gap ─> two gaps alike: keep_s
needed (more than would be there otherwise): a burst came, keep_s holds; none came until workers go: it is forgotten

Without it, bursts that are shorter than a worker's start are never answered in time: workers come when a burst is over,
and are gone before the next. "Serverless in the Wild" (Shahrad et al., USENIX ATC 2020) keeps containers by a histogram
of idle times; two gaps stand for it here.
"""

from __future__ import annotations

import math
from collections import deque

GAPS_ALIKE = 2  # gaps that have to agree, which takes three bursts
GAP_S_MAX = 900.0  # bursts that are further apart are worth no workers in between
ALIKE_SHARE = 0.75  # gaps are alike if the shorter is at least this share of the longer
MARGIN = 1.25  # of the longer one: for that time workers are kept


class Recurrence:
    """The gaps between the bursts of one pool. Instants are passed in, and must not decrease."""

    def __init__(self) -> None:
        self._needed_at: float | None = None  # when the workers that the pool gave up were last needed
        self._gaps_s: deque[float] = deque(maxlen=GAPS_ALIKE)
        self._came_at = 0.0  # when a burst came last
        self._low = math.inf  # workers that would be there now, had none been kept since the last burst

    @property
    def keep_s(self) -> float:
        """For how long workers are to be kept after they were last needed; 0: bursts do not recur."""
        gaps_s = self._gaps_s
        if len(gaps_s) < GAPS_ALIKE or min(gaps_s) < ALIKE_SHARE * max(gaps_s):
            return 0.0
        return MARGIN * max(gaps_s)

    def shrank(self, needed_at: float) -> None:
        """Record that the pool gave workers up, and when they were last needed.

        If workers are kept for bursts and none has come since, the interval is forgotten. If one has come, it needed
        fewer workers, as those for a backlog that there no longer is.
        """
        if self.keep_s:
            if self._came_at > needed_at:
                return
            self._gaps_s.clear()
        if self._needed_at is None:  # later steps down belong to the same burst
            self._needed_at = needed_at

    def needed(self, workers: int, kept: int, now: float) -> None:
        """Record how many workers are needed now, and how many there would be if none were kept for bursts."""
        self._low = min(self._low, kept)
        if workers > self._low:
            self._low, self._came_at = workers, now

    def grew(self, now: float) -> None:
        """Record that the pool wants more workers. Further steps up belong to the same burst."""
        if self._needed_at is None:
            return
        gap_s, self._needed_at = now - self._needed_at, None
        if gap_s <= GAP_S_MAX:
            self._gaps_s.append(gap_s)
        else:
            self._gaps_s.clear()
