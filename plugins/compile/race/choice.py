"""The winner: a table batch size -> candidate, or nothing where no candidate gains enough. Pure.

A candidate wins if the lower end of its interval is a gain of 5 %. Two variants, or one and the baseline, share the
batch sizes only if that gains 5 % more: each takes memory. A lossy one must gain 5 % over the best that is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from millstream.plugins.compile.race.report import BASELINE
from millstream.plugins.compile.race.statistics import Interval, Round, by_size, overall

GAIN_MIN = 1.05  # by the lower end of the interval
ROUNDS_MIN = 5  # of fewer rounds an interval says nothing


class Measured(NamedTuple):
    """A candidate that passed the gate, with its rounds. `single`: it runs single rows only."""

    key: str
    lossy: bool
    single: bool
    rounds: tuple[Round, ...]


class Choice(NamedTuple):
    """What serves from now on.

    Args:
        winner: key of the candidate with the most weight; None: nothing changes.
        ratio: how many times as fast as the baseline the table is.
        table: batch size -> key or BASELINE; empty: nothing changes.
        why: one sentence without its end.
    """

    winner: str | None
    ratio: float
    table: dict[int, str]
    why: str


class _Plan(NamedTuple):
    table: dict[int, str]
    interval: Interval
    lossy: bool

    @property
    def wins(self) -> bool:
        return self.interval.low >= GAIN_MIN


def choose(measured: Sequence[Measured], weights: Mapping[int, float], seed: int = 0) -> Choice:
    """Return the winner among candidates.

    Args:
        measured: candidates; those with fewer rounds than ROUNDS_MIN cannot win.
        weights: batch size -> how many runs have it.
        seed: of the intervals.
    """
    able = sorted((one for one in measured if len(one.rounds) >= ROUNDS_MIN), key=lambda one: one.key)
    sizes = [rows for rows in sorted(weights) if all(rows in one.rounds[0] for one in able if not one.single)]
    if not able or not sizes:
        return Choice(None, 1.0, {}, f"no candidate that passed the gate was measured {ROUNDS_MIN} times")
    alone = [_plan(dict.fromkeys(_allowed(one, sizes), one), sizes, weights, seed) for one in able]
    best = max(alone, key=lambda plan: plan.interval.median)
    exact = max((plan for plan in alone if not plan.lossy), key=lambda plan: plan.interval.median, default=None)
    if exact is not None and exact.wins and best.interval.median < exact.interval.median * GAIN_MIN:
        best = exact
    pairs = [_plan(table, sizes, weights, seed) for table in _shared(able, sizes)]
    shared = max(pairs, key=lambda plan: plan.interval.median, default=best)
    pays = shared.interval.median >= GAIN_MIN * (best.interval.median if best.wins else 1.0)
    if shared.wins and pays:
        best = shared
    if not best.wins:
        median, low, high = best.interval
        name = next((key for key in best.table.values() if key != BASELINE), BASELINE)
        return Choice(None, 1.0, {}, f"the fastest, {name}, is {median:.2f} times as fast ({low:.2f} to {high:.2f})")
    return _choice(best, weights, singles={one.key for one in able if one.single})


def _allowed(one: Measured, sizes: Sequence[int]) -> list[int]:
    return [rows for rows in sizes if rows in one.rounds[0] and (rows == 1 or not one.single)]


def _plan(table: Mapping[int, Measured], sizes: Sequence[int], weights: Mapping[int, float], seed: int) -> _Plan:
    """Return a table with its interval; sizes that are not in it run on the baseline."""
    count = min((len(one.rounds) for one in table.values()), default=0)
    rounds = [
        {rows: table[rows].rounds[at][rows] if rows in table else 1.0 for rows in sizes} for at in range(max(1, count))
    ]
    keys = {rows: table[rows].key if rows in table else BASELINE for rows in sizes}
    interval = overall(rounds, {rows: weights[rows] for rows in sizes}, seed)
    return _Plan(keys, interval, any(one.lossy for one in table.values()))


def _shared(able: Sequence[Measured], sizes: Sequence[int]) -> Iterable[dict[int, Measured]]:
    """Yield for each pair of candidates, and each candidate with the baseline, which is best at which size."""
    medians = {one.key: {rows: found.median for rows, found in by_size(one.rounds).items()} for one in able}
    groups: list[tuple[Measured, ...]] = [*((one,) for one in able), *combinations(able, 2)]
    for group in groups:
        table: dict[int, Measured] = {}
        for rows in sizes:
            options = [one for one in group if rows in _allowed(one, sizes)]
            if len(group) == 1:  # the baseline is the other
                options = [one for one in options if medians[one.key][rows] > 1.0]
            if options:
                table[rows] = max(options, key=lambda one: medians[one.key][rows])
        if table:
            yield table


def _choice(plan: _Plan, weights: Mapping[int, float], singles: set[str]) -> Choice:
    table = dict(plan.table)
    if max(table) == 1 and table[1] in singles:
        table[2] = BASELINE  # so that no batch of two rows takes the entry of one
    shares: dict[str, float] = {}
    for rows, key in plan.table.items():
        if key != BASELINE:
            shares[key] = shares.get(key, 0.0) + weights[rows]
    winner = max(sorted(shares), key=lambda key: shares[key])
    median, low, high = plan.interval
    return Choice(winner, median, table, f"it is {median:.2f} times as fast ({low:.2f} to {high:.2f})")
