"""Ratios of rounds: the median and its 95 % interval. Pure.

A round measures the baseline and a candidate in the order A B B A at every batch size: what slows the machine down for
longer than a round slows both, and a steady drift cancels. Ratios of rounds are independent of each other, so that the
interval comes from drawing rounds again (percentile bootstrap, Efron 1979), with a seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 1000
INTERVAL = (2.5, 97.5)  # percentiles

#: Batch size -> how many times as fast as the baseline, in one round.
Round = Mapping[int, float]


class Interval(NamedTuple):
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float


def ratio_of(baseline_s: Sequence[float], candidate_s: Sequence[float]) -> float:
    """Return how many times as fast the candidate was, from two blocks of each in the order A B B A.

    Args:
        baseline_s: seconds of a run, of both blocks.
        candidate_s: the same.
    """
    return sum(baseline_s) / sum(candidate_s)


def weighted(ratios: Mapping[int, float], weights: Mapping[int, float]) -> float:
    """Return the geometric mean of the ratios at each batch size, weighted by how many runs have this size.

    Sizes without a ratio do not count. Raises ValueError if no size has one.
    """
    total = sum(weight for rows, weight in weights.items() if rows in ratios)
    if not total:
        raise ValueError("no batch size was measured")
    logs = sum(weight * math.log(ratios[rows]) for rows, weight in weights.items() if rows in ratios)
    return math.exp(logs / total)


def interval(ratios: Sequence[float], seed: int = 0) -> Interval:
    """Return the median and its interval; equal for equal arguments. Raises ValueError if `ratios` is empty."""
    if not ratios:
        raise ValueError("there are no rounds")
    values = np.sort(np.asarray(ratios, dtype=np.float64))
    drawn = np.random.default_rng(seed).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), INTERVAL)
    return Interval(float(np.median(values)), float(low), float(high))


def median_ratio(rounds: Sequence[Round], weights: Mapping[int, float]) -> float:
    """Return the median of the weighted ratios. Raises ValueError if no round measured a size of `weights`."""
    return statistics.median([weighted(one, weights) for one in rounds if any(rows in one for rows in weights)])


def overall(rounds: Sequence[Round], weights: Mapping[int, float], seed: int = 0) -> Interval:
    """Return the interval of the weighted ratio. Raises ValueError if no round measured a size of `weights`."""
    return interval([weighted(one, weights) for one in rounds if any(rows in one for rows in weights)], seed)


def by_size(rounds: Sequence[Round], seed: int = 0) -> dict[int, Interval]:
    """Return the interval at each batch size that was measured, the smallest size first."""
    sizes = sorted({rows for one in rounds for rows in one})
    return {rows: interval([one[rows] for one in rounds if rows in one], seed) for rows in sizes}
