"""Learns how many rows should run together: sizes that the warm-up had no time for are tried while rows wait. Pure.

warm-up measured {1: 0.8 s} ─> try 6 rows ─> a run of 6 took 0.9 s ─> try 33 … until a larger size gains nothing

How many rows are tried is bounded as if each cost as much (`Profile.rows_worth_running`). Gateways try a size only
where that estimate meets the deadlines, and in small steps while other versions are called.
"""

from __future__ import annotations

from millstream.services.model.profile import Profile

#: Weight of the latest run in the known time of its size.
CORRECTION = 0.1
#: Runs of a size before deciding whether to run that many rows; the fastest run counts.
TRIALS = 3
#: A size is measured only if it is this many times the largest measured size, so that few are kept.
STEP = 1.5


class Exploration:
    """Run times of one instance by size.

    Args:
        measured: rows -> seconds from the warm-up; changed in place.
    """

    def __init__(self, measured: dict[int, float], rows_max: int) -> None:
        self._measured = measured
        self._largest = max(measured, default=0)
        self._rows_max = rows_max
        self._complete = self._largest >= rows_max
        self._runs: dict[int, int] = {}  # number of runs of each measured size, while larger sizes are left to try

    def ran(self, rows: int, seconds: float, rows_fitting: int) -> int | None:
        """Record a run; returns how many rows should run together from now on, or None for no change.

        `rows_fitting` is the largest number of rows that fit into memory.
        """
        measured, largest = self._measured, self._largest
        known = measured.get(rows)
        if self._complete:
            if known is not None:
                measured[rows] = known + (seconds - known) * CORRECTION
            return None
        seen = self._runs.get(rows, 0)
        if known is None:
            if largest and rows < min(STEP * largest, self._rows_max):
                return None
            measured[rows] = seconds
            self._largest = rows
        elif not seen:
            # The warm-up used generated inputs: sizes are compared by the times of real requests.
            measured[rows] = seconds
        elif seen < TRIALS and rows == largest:
            measured[rows] = min(known, seconds)
        else:
            measured[rows] = known + (seconds - known) * CORRECTION
        self._runs[rows] = seen + 1
        self._complete = rows >= self._rows_max and seen + 1 >= TRIALS
        return self._target(rows_fitting) if seen < TRIALS else None

    def _target(self, rows_fitting: int) -> int:
        target = Profile(self._measured).rows_worth_running(self._rows_max)
        if target < self._largest and 0 < self._runs.get(self._largest, 0) < TRIALS:
            target = self._largest  # the first run of a size, or a disturbed run, says little
        return max(1, min(target, rows_fitting))
