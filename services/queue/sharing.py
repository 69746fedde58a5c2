"""What the scripts are told of a batch to share a pool's workers by time, and which runs count as long there.

A lane with long runs may not have the last worker that other called lanes could use: `reserve` in scripts/_prelude.lua.
"""

from __future__ import annotations

from typing import NamedTuple

LONG_S = 0.1  # shorter runs delay others by no more than that
#: A lane counts as one with long runs for so many times its last long run: they take a twentieth of a worker or more.
LONG_RUNS = 20
LONG_LIFE_MS_MAX = 60_000


class Share(NamedTuple):
    """What a batch takes of its pool's workers.

    Args:
        cost_ms: how long it is expected to run.
        fill: its rows divided by the rows of a full run.
        call: whether it is no readiness probe.
        long_ms: how long it makes its lane count as one with long runs, in ms; 0: not at all.
    """

    cost_ms: float
    fill: float
    call: bool = True
    long_ms: int = 0


def long_life_ms(seconds: float) -> int:
    """Return for how long the lane of a run of `seconds` counts as one with long runs, in ms; 0: not at all."""
    return 0 if seconds < LONG_S else min(LONG_LIFE_MS_MAX, int(LONG_RUNS * 1000 * seconds))
