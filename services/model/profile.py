"""Predicts the duration of a run from its number of rows, by interpolation between measured runs. Pure.

{1: 1 ms, 8: 2 ms, 64: 9 ms} ── predict(20) ─> 3.5 ms ── efficient_rows() ─> 64
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

EFFICIENT_SHARE = 0.9  # of the best rows per second
#: A run of more rows than ever ran takes at most this time if it takes as long for each row, unless twice the largest
#: size takes longer: then it is twice that size. Calls of other models that come meanwhile wait for it.
TRIAL_S = 5.0
TRIAL_GROWTH = 8  # most rows of such a run, in runs of the largest size: more may need far more memory


@dataclass(frozen=True)
class Profile:
    """The measured duration of runs, by number of rows. Empty when nothing could be measured.

    Args:
        seconds: duration in seconds, by number of rows.

    Raises:
        ValueError: rows are below 1, or seconds are negative or infinite.
    """

    seconds: Mapping[int, float]
    _rows: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _seconds: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(rows < 1 or not 0 <= seconds < float("inf") for rows, seconds in self.seconds.items()):
            raise ValueError(f"a profile maps rows (at least 1) to seconds (at least 0), got {dict(self.seconds)}")
        ordered = sorted(self.seconds.items())
        object.__setattr__(self, "_rows", tuple(rows for rows, _ in ordered))
        # More rows never take less time: a measurement that shows less was disturbed.
        object.__setattr__(self, "_seconds", tuple(accumulate((seconds for _, seconds in ordered), max)))

    def predict(self, rows: int) -> float:
        """Return the seconds that a run of `rows` takes, interpolated between measurements; 0 if there are none.

        The result never falls as rows grow. Below the smallest measured size it is the duration of that size; above
        the largest it grows in proportion to the rows.
        """
        if not self._rows or rows < 1:
            return 0.0
        at = bisect_left(self._rows, rows)
        if at == len(self._rows):
            return self._seconds[-1] * rows / self._rows[-1]
        if at == 0 or self._rows[at] == rows:
            return self._seconds[at]
        low, high = self._rows[at - 1], self._rows[at]
        share = (rows - low) / (high - low)
        return self._seconds[at - 1] * (1 - share) + self._seconds[at] * share

    def rows_within(self, seconds: float, rows_max: int) -> int:
        """Return the largest number of rows, from 1 to `rows_max`, whose run takes at most `seconds`; at least 1."""
        return max(1, bisect_right(range(1, rows_max + 1), seconds, key=self.predict))

    @property
    def largest(self) -> int:
        """The largest measured number of rows; 0 if nothing was measured."""
        return self._rows[-1] if self._rows else 0

    def rows_worth_running(self, rows_max: int) -> int:
        """Return the efficient number of rows, at most `rows_max`; `rows_max` if nothing was measured.

        If the largest measured size is the most efficient, a larger one is to be tried: efficiency may still rise. A
        slow model measures only one size at its warm-up, and what waits for it is to run together from the beginning.
        """
        if not self._rows:
            return rows_max
        efficient = self.efficient_rows()
        if efficient < self._rows[-1]:
            return min(rows_max, efficient)
        return max(min(rows_max, 2 * efficient), self.rows_within(TRIAL_S, min(rows_max, TRIAL_GROWTH * efficient)))

    def efficient_rows(self) -> int:
        """Return the smallest measured size with 90 % of the best rows per second; 1 if nothing was measured.

        A larger run gains little throughput and makes its callers wait.
        """
        if not self._rows:
            return 1
        # Seconds per row, not rows per second: a run too short for the clock is 0 s, and a divisor of 0 is avoided.
        cost = [seconds / rows for rows, seconds in zip(self._rows, self._seconds, strict=True)]
        bound = min(cost) / EFFICIENT_SHARE
        return next(rows for rows, seconds in zip(self._rows, cost, strict=True) if seconds <= bound)
