"""How long the runs of one version took, by the bytes of their inputs: what is usual bounds a run while others wait.

Runs are compared with runs of about the same size only: a model may well take longer for larger inputs, and a size that
is new has no bound yet. Runs that were ended do not count, or a model without an end would extend its own bound.
"""

from __future__ import annotations

import math

RUNS_MIN = 20  # of a size, before they bound a run
RUNS_MAX = 2000  # at which all counts are halved, so that old runs fade
SHARE = 0.99  # of the runs take at most what is usual
_STEPS = 4  # durations are counted in steps of 2 ** (1 / 4), 19 %


class RunHistory:
    """The durations of one version's runs. Written by the main loop; `usual_s` may be called in another thread."""

    __slots__ = ("_by_size",)

    def __init__(self) -> None:
        self._by_size: dict[int, dict[int, int]] = {}  # power of two of bytes -> step of the duration -> runs

    def add(self, size_bytes: int, seconds: float) -> None:
        """Record a run that ended by itself."""
        step = math.ceil(_STEPS * math.log2(max(seconds, 1e-6)))
        counts = self._by_size.setdefault(size_bytes.bit_length(), {})
        counts[step] = counts.get(step, 0) + 1
        if counts[step] >= RUNS_MAX:
            self._by_size[size_bytes.bit_length()] = {known: runs // 2 for known, runs in counts.items() if runs > 1}

    def usual_s(self, size_bytes: int) -> float:
        """Return the 99th percentile of the seconds of runs of this size; 0: there were too few."""
        counts = self._by_size.get(size_bytes.bit_length(), {}).copy()
        total = sum(counts.values())
        if total < RUNS_MIN:
            return 0.0
        seen = 0
        for step in sorted(counts):
            seen += counts[step]
            if seen >= SHARE * total:
                return float(2 ** (step / _STEPS))
        raise AssertionError("the shares of all steps are 1")
