"""The records of autoscaling: what each gateway counts for a pool, and what the leading controller decides. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

DECISION_FRESH_S = 15.0  # longer than a change of the leader takes; no process acts on older decisions

#: a number that arithmetic can take: neither negative, nor infinite, nor NaN
Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]


class PoolLoad(BaseModel):
    """What one gateway has counted for one pool. `rows`, `work_s` and `unmeasured_rows` only grow.

    Args:
        rows: rows that arrived, refused ones included.
        work_s: seconds that one worker computes for those whose run times are known, at full batches.
        unmeasured_rows: those whose run times are not known.
        queue_rows: rows that wait or run now.
        queue_work_s: seconds that one worker computes for those.
        oldest_wait_s: for how long the oldest row has waited that has not been sent to a worker.
        run_s: the longest full batch of the lanes in use.
    """

    model_config = ConfigDict(frozen=True)

    rows: Count = 0
    work_s: Amount = 0.0
    unmeasured_rows: Count = 0
    queue_rows: Count = 0
    queue_work_s: Amount = 0.0
    oldest_wait_s: Amount = 0.0
    run_s: Amount = 0.0


class GatewayLoads(BaseModel):
    """What one gateway has counted, by pool. `counted_s`: since its first report; 0: an older release."""

    model_config = ConfigDict(frozen=True)

    pools: dict[str, PoolLoad] = {}
    counted_s: Amount = 0.0


class ScaleDecision(BaseModel):
    """How many workers a pool should have, and why (plugins/fleet/controller/autoscale/decision.py).

    Args:
        decided_at: in seconds on the Redis clock.
        start_s: from a decision until a further worker serves.
        explanation: the arithmetic, line by line.
    """

    model_config = ConfigDict(frozen=True)

    pool: str
    wanted: int
    ready: int
    workers_min: int
    workers_max: int
    queue_rows: int
    oldest_wait_s: float
    arrival_rows_per_s: float
    capacity_rows_per_s: float
    utilisation: float
    reason: str
    decided_at: float
    start_s: float = 0.0
    explanation: tuple[str, ...] = ()


def is_fresh(decision: ScaleDecision, now: float) -> bool:
    """Return whether a decision counts still. `now`: on the Redis clock, which may have been set back since."""
    return abs(now - decision.decided_at) < DECISION_FRESH_S
