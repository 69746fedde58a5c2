"""Measures several cases in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from tests.bench import servers
from tests.bench.load import Load, Payload, measure
from tests.bench.result import Measured

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """What is measured: one payload to one path of a server, from so many connections."""

    name: str
    server: servers.Server
    path: str
    payload: Payload
    connections: int


@dataclass(frozen=True)
class Turn:
    """One measurement of a round, of whatever kind."""

    name: str
    connections: int
    measure: Callable[[], Load]


def medians(loads: Sequence[Load]) -> Load:
    """Return the median of each number."""
    return Load(
        rate=median(load.rate for load in loads),
        p50_us=median(load.p50_us for load in loads),
        p99_us=median(load.p99_us for load in loads),
        cpu_us=median(load.cpu_us for load in loads),
    )


def rounds_of(cases: Sequence[Case], rounds: int, seconds: int, say: Say) -> list[list[Load]]:
    """Measure every case once in each round; return the measurements of each case."""
    turns = [
        Turn(one.name, one.connections, partial(measure, one.server, one.path, one.payload, one.connections, seconds))
        for one in cases
    ]
    return turns_of(turns, rounds, say)


def turns_of(turns: Sequence[Turn], rounds: int, say: Say) -> list[list[Load]]:
    """Take every turn once in each round; return the measurements of each turn."""
    loads: list[list[Load]] = [[] for _ in turns]
    for number in range(rounds):
        for turn, found in zip(turns, loads, strict=True):
            say(f"round {number + 1} of {rounds}: {turn.name}, {turn.connections} connections")
            found.append(turn.measure())
    return loads


def ratio(ours: Sequence[Load], theirs: Sequence[Load], what: Callable[[Load], float]) -> float:
    """Return the median of the ratios within each round; `what` selects the value to compare."""
    return median(what(mine) / what(other) for mine, other in zip(ours, theirs, strict=True))


def measured(cases: Sequence[Case | Turn], found: Sequence[Sequence[Load]]) -> tuple[Measured, ...]:
    """Return the medians of each case, for the table of raw numbers."""
    pairs = zip(cases, found, strict=True)
    return tuple(Measured(case.name, case.connections, medians(loads)) for case, loads in pairs)
