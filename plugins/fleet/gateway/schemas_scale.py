"""schemas_scale: the JSON documents of the admin API about the size of pools, made from decisions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, Field

from millstream.plugins.fleet.scaling import ScaleDecision, is_fresh
from millstream.services.errors import Code, Failure, not_found


class PoolScale(BaseModel):
    """How many workers a pool should have, and why."""

    pool: str
    wanted: int = Field(description="Workers that the pool should have.")
    ready: int = Field(description="Workers that serve.")
    workers_min: int
    workers_max: int
    queue_rows: int = Field(description="Rows that wait or run.")
    oldest_wait_s: float = Field(description="For how long the oldest row has waited in a gateway.")
    arrival_rows_per_s: float = Field(description="Rows that arrive, refused ones included.")
    capacity_rows_per_s: float = Field(description="Rows that the ready workers answer at full batches; 0: not known.")
    utilisation: float = Field(description="Work that arrives as a share of what the ready workers can do.")
    reason: str = Field(
        description=(
            "What decided: arrivals, backlog, held, recurring, idle, minimum, maximum, or unbounded: no limits are set."
        )
    )
    decided_at: float = Field(description="Seconds since the epoch, on the Redis clock.")
    start_s: float = Field(0.0, description="Seconds from a decision until a further worker serves, as measured.")
    explanation: list[str] = Field([], description="The arithmetic of the decision, line by line.")

    @classmethod
    def of(cls, decision: ScaleDecision) -> Self:
        return cls.model_validate(decision.model_dump())


class Scale(BaseModel):
    """All pools about which a controller decided."""

    pools: list[PoolScale]


def scale(decisions: Mapping[str, ScaleDecision]) -> Scale:
    """Return all decisions, by the name of the pool, old ones included: `decided_at` says their age."""
    return Scale(pools=[PoolScale.of(decisions[pool]) for pool in sorted(decisions)])


def pool_scale(decisions: Mapping[str, ScaleDecision], pool: str, now: float) -> PoolScale:
    """Return the decision about a pool. Raises Failure: NOT_FOUND, UNAVAILABLE if no controller decides now.

    Args:
        decisions: the last ones, by pool.
        pool: its name.
        now: the current instant on the Redis clock.
    """
    decision = decisions.get(pool)
    if decision is None:
        known = ", ".join(sorted(decisions)) or "none"
        raise not_found(f"no controller has decided about a pool '{pool}': the pools are {known}")
    if not is_fresh(decision, now):
        age_s = now - decision.decided_at
        raise Failure(Code.UNAVAILABLE, f"no controller leads: the last decision is {age_s:.0f} s old", retry_after_s=1)
    return PoolScale.of(decision)
