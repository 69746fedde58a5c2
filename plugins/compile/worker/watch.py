"""Decides from live runs whether a compiled form that won a race is slower than the baseline. Pure.

run of the variant ─> seconds / seconds that the baseline took for as many rows ─> window; its median is high ─> compare
compare: the next live batches run variant, baseline, baseline, variant, … ─> medians ─> undo, or go on with a new scale

The baseline was measured before the swap, perhaps on a quieter machine. So a high median alone undoes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median

WINDOW = 64  # runs whose median counts
SUSPECT = 1.25  # median of the window beyond which live batches are compared
COMPARED = 12  # runs of each form after which a comparison is judged first, then after twice as many, and so on
COMPARED_MAX = 96  # runs of each form after which a comparison ends without a verdict
SURE = 3.3  # standard deviations of the rank sum by which a form is slower by chance once in 2,000 times
ENDLESS_RUNS = (
    20  # times as long as the baseline's, and ENDLESS_S: a run that was ended then says something of the form
)
ENDLESS_S = 0.5
SLOWER = 1.1  # the variant is undone if its median is larger than the baseline's by this factor


class FormWatch:
    """What live runs of one form showed.

    Args:
        baseline: rows of a run -> seconds that the baseline took, as measured when the form was swapped in; empty:
            not known, and nothing is compared.
    """

    def __init__(self, baseline: Mapping[int, float]) -> None:
        self._sizes = sorted(baseline)
        self._seconds = [baseline[rows] for rows in self._sizes]
        self._scale = 1.0  # how much longer the baseline takes now than when it was measured
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._compared = (deque[float](maxlen=COMPARED_MAX), deque[float](maxlen=COMPARED_MAX))  # variant, baseline
        self._judged_next = COMPARED  # runs of each form
        self._turn = 0  # of a comparison
        self.comparing = False

    @property
    def baseline_next(self) -> bool:
        """Whether the next live batch runs with the baseline: A B B A of a comparison."""
        return self.comparing and self._turn % 4 in {1, 2}

    def ran(self, rows: int, seconds: float, *, baseline: bool) -> str:
        """Take in one run of live rows; returns why the variant is to be undone; "": it is not."""
        expected = self._expected(rows)
        if not expected:
            return ""
        ratio = seconds / expected
        if self.comparing:
            self._compared[baseline].append(ratio)
            self._turn += 1
            return self._judge() if min(map(len, self._compared)) >= self._judged_next else ""
        if not baseline:
            self._window.append(ratio / self._scale)
            self.comparing = len(self._window) == WINDOW and median(self._window) > SUSPECT
        return ""

    def endless(self, rows: int, seconds: float) -> bool:
        """Return whether a run that was ended had taken far longer than one of the baseline."""
        return seconds >= max(ENDLESS_S, ENDLESS_RUNS * self._expected(rows))

    def _judge(self) -> str:
        """End a comparison, or go on where a busy machine makes the slower form hard to tell."""
        ones, others = (list(one)[-self._judged_next :] for one in self._compared)  # the latest, of both as many
        variant, baseline = median(ones), median(others)
        slower = variant > SLOWER * baseline
        sure = slower and rank_deviations(ones, others) >= SURE
        if slower and not sure and self._judged_next < COMPARED_MAX:
            self._judged_next *= 2
            return ""
        self.comparing, self._turn, self._judged_next = False, 0, COMPARED
        for one in (*self._compared, self._window):
            one.clear()
        if sure:
            return f"live runs took {variant / baseline:.2f} times as long as those of the baseline beside them"
        self._scale = max(1.0, baseline)
        return ""

    def _expected(self, rows: int) -> float:
        """Return the seconds of the baseline for the next larger number of rows that was measured; 0: not known."""
        for size, seconds in zip(self._sizes, self._seconds, strict=True):
            if rows <= size:
                return seconds
        return self._seconds[-1] * rows / self._sizes[-1] if self._sizes else 0.0


def rank_deviations(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return by how many standard deviations `ones` rank above `others`: the test of Mann and Whitney (1947).

    Ranks, because the times of runs on a busy machine follow no normal distribution.
    """
    pairs = len(ones) * len(others)
    above = sum(1.0 if one > other else 0.5 if one == other else 0.0 for one in ones for other in others)
    deviation: float = sqrt(pairs * (len(ones) + len(others) + 1) / 12)
    return (above - pairs / 2) / deviation
