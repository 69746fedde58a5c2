"""Predicts when a version is loaded, from what its worker loads before it. Pure.

LoadRecords of a worker, seconds that each load takes ─> ready_in_s ─> seconds until a version can serve
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream.services.wire.records import LoadRecord


def ready_in_s(
    loads: Sequence[LoadRecord], load_s_of: Callable[[str], float], content_id: str, load_s: float, now: float
) -> float:
    """Return the predicted seconds until a version is loaded; one that is not in `loads` comes after all of them.

    Loads that run beside each other are predicted as if each had the worker to itself.

    Args:
        loads: the loads of its worker, in the order in which they begin.
        load_s_of: returns the seconds that loading a content id takes; 0: unknown.
        content_id: the version.
        load_s: what loading it takes.
        now: the current instant, on the clock of the records.
    """
    begins = now
    for one in loads:
        if one.content_id == content_id:
            return max(0.0, (one.began or begins) + load_s - now)
        began = one.began or begins
        begins = max(begins, min(began + load_s_of(one.content_id), began + one.yields_s))
    return begins + load_s - now
