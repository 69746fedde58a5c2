"""When candidates are compiled and measured: successive halving within a budget of seconds. Pure; time is passed in.

0 ── each: compile, a few rounds ── 60 % ── judge, the fastest first ── 75 % ── the better half: twice the rounds ── …
Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from millstream.plugins.compile.candidate import Candidate
from millstream.plugins.compile.race.choice import ROUNDS_MIN
from millstream.plugins.compile.race.estimate import Estimate, by_promise
from millstream.plugins.compile.race.statistics import Round, median_ratio, overall

ENTRY_SHARE = 0.6  # of the budget, for compilations and first rounds
FINAL_SHARE = 0.25  # of the budget, in which only the best are measured: judging ends before, if one of them may win
COMPILE_S_MIN = 1.0  # with less time left, a candidate is not compiled
COMPILE_SHARE = 0.5  # of the time that is left for entries, which one compilation may take at most
#: a compilation may take so many equal parts of that time, of which each candidate that waits has one; one that takes
#: longer is set aside, and tried again after the others with up to this many times its limit
COMPILE_PARTS = 2.0
#: of the whole time for entries, which a compilation may take at least: with many candidates an equal part is too short
#: for most of them, and the time is spent on compilations of which none ends
COMPILE_LEAST = 0.12
AGAIN_MIN = 1.25  # of the limit of the first try: with less time left there is no second one
ESTIMATE_PARTS = 2.0  # a compilation may take so many times what earlier races say, if there is that much time
ESTIMATE_LEAST = 0.5  # of its estimate: with less time left, a compilation is not begun
SLOW = 0.5  # times as fast as the baseline after one round: a candidate below it gets no second first round
ROUNDS_FIRST = 2
ROUNDS_MAX = 40  # of one candidate
FINALISTS = 2
NARROW = 0.02  # width of an interval, relative to its median, with which measuring ends


class Budget(NamedTuple):
    """Seconds of a race, from `began` on a monotonic clock."""

    began: float
    seconds: float

    def left_s(self, now: float) -> float:
        """Return the seconds until the end, at least 0."""
        return max(0.0, self.began + self.seconds - now)

    def entry_left_s(self, now: float) -> float:
        """Return the seconds in which candidates may still enter the race, at least 0."""
        return max(0.0, self.began + self.seconds * ENTRY_SHARE - now)

    def judge_left_s(self, now: float) -> float:
        """Return the seconds in which candidates are judged although one may win already, at least 0."""
        return max(0.0, self.began + self.seconds * (1 - FINAL_SHARE) - now)

    def compile_s_max(self, now: float, waiting: int, estimate_s: float | None = None) -> float:
        """Return how long the next compilation may take; 0: no candidate enters any longer.

        Args:
            now: the current instant.
            waiting: candidates that are not compiled, this one included.
            estimate_s: what it is expected to take; None: that is not known.
        """
        left = self.entry_left_s(now)
        most = left * COMPILE_SHARE
        if most < COMPILE_S_MIN:
            return 0.0
        part = max(left * COMPILE_PARTS / waiting, self.seconds * ENTRY_SHARE * COMPILE_LEAST)
        return max(COMPILE_S_MIN, min(most, max(part, ESTIMATE_PARTS * (estimate_s or 0.0))))


def entry_order(candidates: Iterable[Candidate], estimates: Mapping[str, Estimate] | None = None) -> list[Candidate]:
    """Return the candidates in the order in which they enter: those with the most expected gain for each second first.

    Of equal ones: the first of each target, then the second of each, so that a budget that ends early has seen every
    target. A candidate that is given twice enters once.
    """
    by_target: dict[str, dict[str, Candidate]] = {}
    for one in candidates:
        by_target.setdefault(one.target, {})[one.key] = one
    turns = zip_longest(*(of.values() for of in by_target.values()))
    return by_promise([one for turn in turns for one in turn if one is not None], estimates or {})


def survivors(measured: Mapping[str, Sequence[Round]], weights: Mapping[int, float]) -> list[str]:
    """Return the better half, the best first, and the best at each batch size.

    At least FINALISTS, if there are that many.
    """
    ranked = ranking(measured, weights)
    kept = ranked[: max(FINALISTS, math.ceil(len(ranked) / 2))]
    for rows in weights:
        best = ranking(measured, {rows: 1.0})[:1]
        kept += [key for key in best if key not in kept]
    return kept


def ranking(measured: Mapping[str, Sequence[Round]], weights: Mapping[int, float]) -> list[str]:
    """Return the keys of what was measured, the fastest first; equal ones in the order of their names."""
    medians = {
        key: median_ratio(rounds, weights)
        for key, rounds in measured.items()
        if any(rows in one for one in rounds for rows in weights)
    }
    return sorted(medians, key=lambda key: (-medians[key], key))


def rounds_in(rung: int) -> int:
    """Return how many rounds each candidate is measured in a rung; rung 0 has all candidates."""
    return min(ROUNDS_MAX, ROUNDS_FIRST << rung)


def is_settled(rounds: Sequence[Round], weights: Mapping[int, float], seed: int = 0) -> bool:
    """Return whether more rounds would change nothing: the interval is narrow, or there are enough."""
    if len(rounds) < 2 * ROUNDS_MIN:
        return False
    if len(rounds) >= ROUNDS_MAX:
        return True
    found = overall(rounds, weights, seed)
    return found.high - found.low <= NARROW * found.median
