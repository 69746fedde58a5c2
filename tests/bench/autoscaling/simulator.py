"""A pool under a virtual clock: rows arrive, workers start and answer them in order, a rule decides once a second."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.bench.autoscaling.rules import Rule, Seen, Worker

SAMPLES = 4  # rows of each second whose wait is measured

Array = npt.NDArray[np.float64]


class Outcome(NamedTuple):
    """What a rule cost and missed."""

    missed: float  # share of the rows that were answered later than the target
    worker_hours: float
    changes: int
    most: int


def simulate(rule: Rule, arrivals: Array, worker: Worker, latency_s: float) -> Outcome:
    """Run a trace: `arrivals` are rows in each second."""
    seconds = len(arrivals)
    served = np.zeros(seconds)
    wanted, ready, inside, changes, hours, most = 1, 1, 0.0, 0, 0.0, 1
    starting: deque[float] = deque()  # instants at which they serve
    for second in range(seconds):
        while starting and starting[0] <= second:
            starting.popleft()
            ready += 1
        capacity = ready * worker.rows_per_s
        before = inside + arrivals[second]
        done = min(before, capacity)
        served[second] = done
        inside = before - done
        busy = done / capacity if capacity else 1.0
        running = done * worker.run_s
        decided = rule.wanted(Seen(arrivals[second], inside + running, ready, busy), float(second))
        changes += decided != wanted
        wanted = decided
        for _ in range(wanted - ready - len(starting)):
            starting.append(second + worker.start_s)
        while ready + len(starting) > wanted and starting:
            starting.pop()
        ready = min(ready, wanted) if ready > wanted else ready
        hours += (ready + len(starting)) / 3600
        most = max(most, wanted)
    return Outcome(_missed(arrivals, served, worker, latency_s), hours, changes, most)


def _missed(arrivals: Array, served: Array, worker: Worker, latency_s: float) -> float:
    """Return the share of rows whose wait and run took longer than the target: first come, first served."""
    clock = np.arange(len(arrivals) + 1, dtype=np.float64)
    arrived, answered = np.concatenate([[0.0], np.cumsum(arrivals)]), np.concatenate([[0.0], np.cumsum(served)])
    shares = (np.arange(SAMPLES) + 0.5) / SAMPLES
    rows = (arrived[:-1, None] + shares * arrivals[:, None]).ravel()
    came = (clock[:-1, None] + shares).ravel()
    # Where nothing was served, the curve is flat: a row leaves when it rises again.
    rising = np.concatenate([[True], served > 0])
    left = np.interp(rows, answered[rising], clock[rising], right=np.inf)
    late = np.maximum(left, came) - came + worker.run_s > latency_s
    weights = np.repeat(arrivals / SAMPLES, SAMPLES)
    total = weights.sum()
    return float((late * weights).sum() / total) if total else 0.0
