"""What the policy remembers of one pool: rates over windows from 1 s to 10 min, and whether bursts recur. Pure.

Envelope.add (work and rows that arrived) ─> cumulated sums ─> rate of the window that ends now, largest rate by window
Recurrence: shrank (the pool gives workers up) ─> grew (it wants them again): a gap ─> two gaps alike: keep_s
            needed: a burst came, keep_s holds; none came until workers go: it is forgotten

The rate is work: seconds that one worker computes for what arrives in a second, at full batches. It is the number of
workers that are busy all the time. Envelopes of rates by window: InferLine (Crankshaw et al., SoCC 2020), after the
arrival curves of network calculus.

Without recurrence, bursts that are shorter than a worker's start are never answered in time: workers come when a burst
is over, and are gone before the next. "Serverless in the Wild" (Shahrad et al., USENIX ATC 2020) keeps containers by a
histogram of idle times; two gaps stand for it here.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import NamedTuple

WINDOWS_S = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
KEPT_S = WINDOWS_S[-1]
SAMPLES_MAX = 4096  # beyond, the oldest are dropped: the longest windows are then not known
GAPS_ALIKE = 2  # gaps that have to agree, which takes three bursts
GAP_S_MAX = 900.0  # bursts that are further apart are worth no workers in between
ALIKE_SHARE = 0.75  # gaps are alike if the shorter is at least this share of the longer
MARGIN = 1.25  # of the longer one: for that time workers are kept


class Arrived(NamedTuple):
    """What arrived up to an instant."""

    at: float
    work_s: float
    rows: float


class Envelope:
    """What arrived in the last KEPT_S. Instants must not decrease."""

    def __init__(self) -> None:
        self._sums: list[Arrived] = []

    @property
    def end(self) -> float:
        """The instant of the last sample; 0 before the first."""
        return self._sums[-1].at if self._sums else 0.0

    @property
    def known_s(self) -> float:
        """For how long arrivals are known."""
        return self._sums[-1].at - self._sums[0].at if self._sums else 0.0

    def add(self, now: float, work_s: float, rows: float) -> None:
        """Add what arrived since the last call; the first call begins the envelope."""
        last = self._sums[-1] if self._sums else Arrived(now, 0.0, 0.0)
        self._sums.append(Arrived(max(now, last.at), last.work_s + work_s, last.rows + rows))
        begin = bisect.bisect_right(self._sums, last.at - KEPT_S, key=lambda one: one.at) - 1
        begin = max(begin, len(self._sums) - SAMPLES_MAX)
        if begin > 0:
            del self._sums[:begin]

    def rate(self, window_s: float) -> float:
        """Return the work a second that arrived in the window that ends with the last sample.

        After a gap, such as an outage of Redis, the window is as long as the gap: when in it the work arrived is not
        known.
        """
        if not self._sums:
            return 0.0
        last, before = self._sums[-1], self._before(window_s)
        return (last.work_s - before.work_s) / max(window_s, last.at - before.at)

    def rows_per_s(self, window_s: float) -> float:
        """Return the rows a second of that window."""
        if not self._sums:
            return 0.0
        last, before = self._sums[-1], self._before(window_s)
        return (last.rows - before.rows) / max(window_s, last.at - before.at)

    def _before(self, window_s: float) -> Arrived:
        """Return the last sample that is at least a window old; the first one if all are younger."""
        begin = self._sums[-1].at - window_s
        at = bisect.bisect_right(self._sums, begin + 1e-9, key=lambda one: one.at) - 1
        return self._sums[max(0, at)]


class Largest:
    """The largest of the values that were added within a time."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()  # falling: (instant, value)

    def add(self, now: float, value: float) -> None:
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))

    def forget(self, before: float) -> None:
        """Forget the values that were added before an instant."""
        while self._values and self._values[0][0] < before:
            self._values.popleft()

    def within(self, now: float, seconds: float) -> tuple[float, float]:
        """Return the largest value of the last `seconds`, with its instant; (now, 0): there is none."""
        return next((one for one in self._values if one[0] >= now - seconds), (now, 0.0))


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
