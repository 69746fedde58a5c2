"""Decides how many rows a batch takes. Pure; dispatch.py decides when it leaves.

workers' report ─> rows of an efficient run ─(other lanes of the pool in use)─> shared_rows ─(a deadline is near)─>
LatencyEstimator.rows_within ─(the version has preferred sizes)─> preferred_rows
"""

from __future__ import annotations

from collections.abc import Iterable

from millstream.services.model.profile import Profile

#: Bounds a run while other lanes of the pool are in use, because they wait for it. If TURN_RUNS times the run of one
#: row is longer, that is the bound: splitting a batch into runs that are hardly shorter gains nothing.
TURN_S = 0.01
TURN_RUNS = 1.5


def shared_rows(profile: Profile, rows_efficient: int) -> int:
    """Return the rows that run together while other lanes of the pool are in use: at most `rows_efficient`.

    Args:
        profile: measured run times.
        rows_efficient: rows of an efficient run.
    """
    within = profile.rows_within(max(TURN_S, TURN_RUNS * profile.predict(1)), rows_efficient)
    # Workers may ask for a size that was never measured: the profile predicts no gain for it. Try it.
    return rows_efficient if within == profile.largest else within


def preferred_rows(preferred: Iterable[int], rows: int, rows_waiting: int) -> int:
    """Return the largest preferred size within `rows` and the waiting rows; `rows` if there is none."""
    return max((size for size in preferred if size <= min(rows, rows_waiting)), default=rows)
