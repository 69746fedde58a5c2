"""What the policy decides on and what it decides, with the arithmetic kept for people. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """What an operator allows for a pool.

    Args:
        workers_min: workers that stay without any load; 0: the pool may scale to zero.
        workers_max: the budget; never more are wanted.
        latency_s: within this time a row is to be answered: what waits may wait that long less its run.
        down_s: workers stay for this time after they were last needed.
        bounded: False: no operator has said what the pool may have, so it is to keep the workers that run.
    """

    workers_min: int
    workers_max: int
    latency_s: float = 0.2
    down_s: float = 120.0
    bounded: bool = True


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What gateways and workers have published about a pool since the last decision.

    Args:
        rows: rows that arrived since the last decision, refused ones included.
        work_s: seconds that one worker computes for them, at full batches.
        queue_rows: rows that wait or run.
        queue_work_s: seconds that one worker computes for those.
        oldest_wait_s: for how long the oldest row has waited that has not been sent to a worker.
        ready: workers that serve.
        start_s: from the decision until a further worker serves, as measured, its loads included.
        run_s: the longest run of a full batch.
        row_s: seconds of one row at full batches, by the latest traffic; 0: unknown.
        running: workers that serve or start.
    """

    rows: float = 0.0
    work_s: float = 0.0
    queue_rows: float = 0.0
    queue_work_s: float = 0.0
    oldest_wait_s: float = 0.0
    ready: int = 0
    start_s: float = 5.0
    run_s: float = 0.0
    row_s: float = 0.0
    running: int = 0


class Reason(StrEnum):
    """What decided the number of workers."""

    ARRIVALS = "arrivals"  # the work that arrives
    BACKLOG = "backlog"  # rows that wait and that the workers of now would not have answered in time
    HELD = "held"  # fewer are needed now; they stay until `down_s` has passed
    RECURRING = "recurring"  # fewer are needed now; bursts need them again at regular intervals
    IDLE = "idle"  # nothing arrives: the minimum
    MINIMUM = "minimum"
    MAXIMUM = "maximum"  # more are needed than the budget allows
    UNBOUNDED = "unbounded"  # no limits are known for the pool: what runs stays


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers a pool should have, and why.

    Args:
        decided_at: on the clock of the caller.
        start_s: the start time of a worker with which it was decided.
        explanation: the arithmetic, line by line.
    """

    pool: str
    wanted: int
    ready: int
    workers_min: int
    workers_max: int
    queue_rows: float
    oldest_wait_s: float
    arrival_rows_per_s: float
    capacity_rows_per_s: float
    utilisation: float
    reason: str
    decided_at: float
    start_s: float = 0.0
    explanation: tuple[str, ...] = ()
