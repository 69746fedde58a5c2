"""The batch sizes that a race measures, with their weights: those that this version's batches really had. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.plugins.compile.race.report import SIZES_MAX

BATCHES_MIN = 100  # fewer may be readiness probes and first tries alone, and say nothing about the traffic


def batch_weights(batches: Mapping[int, float], rows_max: int) -> dict[int, float]:
    """Return the most frequent batch sizes with their counts; empty if too few batches ran.

    Args:
        batches: size -> how many batches had it.
        rows_max: of the version; larger batches are left out.
    """
    if sum(batches.values()) < BATCHES_MIN:
        return {}
    rows = {size: float(count) for size, count in batches.items() if count > 0 and 1 <= size <= rows_max}
    return {size: rows[size] for size in sorted(sorted(rows, key=lambda one: (-rows[one], one))[:SIZES_MAX])}
