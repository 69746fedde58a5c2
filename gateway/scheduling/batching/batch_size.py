"""Decides how many rows a batch takes. Pure; dispatch.py decides when it leaves.

workers' report ─> rows of an efficient run ─(other lanes of the pool in use)─> shared_rows ─(a deadline is near)─>
LatencyEstimator.rows_within ─(the version has preferred sizes)─> preferred_rows, or a wait for more requests
"""

from __future__ import annotations

from collections.abc import Sequence

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
    # Workers may ask for a size that was never measured: the profile predicts no gain for it. Try small steps.
    return min(rows_efficient, 2 * within) if within == profile.largest else within


def preferred_rows(preferred: Sequence[int], sums: Sequence[int], rows_waiting: int) -> int | None:
    """Return the rows of the batch to send of a version with preferred sizes; None: more requests may make one.

    Requests are never split, so a batch is one of the `sums`. The largest that is a preferred size is sent. If there is
    none, requests that cannot make one any more are sent: because they are more rows than the largest size, of which as
    many as are within it, or because the next request cannot join them.

    Args:
        preferred: the preferred sizes.
        sums: rows of the first waiting request, of the first two, … as far as they fit into one batch.
        rows_waiting: rows of all waiting requests.

    Source: Triton, dynamic_batch_scheduler.cc, GetDynamicBatch.
    """
    fitting = [rows for rows in sums if rows in preferred]
    if fitting:
        return fitting[-1]
    largest, together = max(preferred), sums[-1]
    if together >= largest:
        return max((rows for rows in sums if rows <= largest), default=sums[0])
    return together if rows_waiting > together else None
