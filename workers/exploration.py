"""How many rows run together, learnt as a version runs: sizes that the warm-up had no time for are tried when rows wait.

warm-up measured {1: 0.8 s} ─> 2 rows are worth a try ─> a run of 2 took 0.8 s ─> 4 are … until a size gains nothing

Gateways predict what was never run as linear in its rows, so a try is sent only where even that meets the deadlines. Pure.
"""

from __future__ import annotations

from millstream.services.model.profile import Profile

#: weight of the latest run in the known time of its number of rows
CORRECTION = 0.1
#: runs after which a size that gained nothing is not tried any more: the fastest of them counts
TRIALS = 3
#: a size is learnt when it is so many times the largest known one, so that few are kept
STEP = 1.5


class Exploration:
    """What the runs of one instance taught. `measured`: rows -> seconds from the warm-up; it is changed in place."""

    def __init__(self, measured: dict[int, float], rows_max: int) -> None:
        self._measured = measured
        self._largest = max(measured, default=0)
        self._rows_max = rows_max
        self._complete = self._largest >= rows_max
        self._runs: dict[int, int] = {}  # of sizes beyond which there are others to try

    def ran(self, rows: int, seconds: float, rows_fitting: int) -> int | None:
        """Note a run; returns how many rows shall run together from now on, or None: as many as before.

        `rows_fitting`: the most that there is memory for.
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
            # The warm-up made its inputs up: how long those of callers take is what sizes are compared by.
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
            target = self._largest  # the first run of a size, or a disturbed one, says little
        return max(1, min(target, rows_fitting))
