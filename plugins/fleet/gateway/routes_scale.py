"""GET /admin/v1/scale and /admin/v1/scale/POOL, which KEDA's metrics-api trigger and others read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from fastapi import APIRouter
from pydantic import BaseModel, Field

from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.errors import documented
from millstream.plugins.fleet.gateway.reporter import LoadReporter
from millstream.plugins.fleet.scaling import ScaleDecision, is_fresh
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import Code, Failure, not_found

router = APIRouter(prefix="/admin/v1")


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


class ScaleChanges(BaseModel):
    """The last changes of how many workers a pool should have."""

    changes: list[PoolScale] = Field(description="The newest first.")


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


@router.get(
    "/scale",
    summary="How many workers each pool should have",
    description="The last decisions of the leading controller, for all gateways and workers of the installation.",
    responses=documented(503),
)
async def list_scale(deps: DepsOf) -> Scale:
    decisions, _ = await deps.part(LoadReporter).decisions()
    return Scale(pools=[PoolScale.of(decisions[pool]) for pool in sorted(decisions)])


@router.get(
    "/scale/{pool}",
    summary="How many workers a pool should have, and why",
    description="503 while no controller decides: a scaler keeps what there is, or what its fallback says.",
    responses=documented(404, 503),
)
async def get_scale(pool: str, deps: DepsOf) -> PoolScale:
    decisions, now = await deps.part(LoadReporter).decisions()
    return pool_scale(decisions, pool, now)


@router.get(
    "/scale/{pool}/changes",
    summary="Decisions that changed how many workers a pool should have",
    description="Those of the last hours, the newest first: at most 100, for a day after the last one.",
    responses=documented(503),
)
async def get_scale_changes(pool: str, deps: DepsOf) -> ScaleChanges:
    found = await deps.part(LoadReporter).changes(pool)
    return ScaleChanges(changes=[PoolScale.of(decision) for decision in found])


_READ = Row(Need.READ, admin=True)
_TAG = Tag("admin: scale", "How many workers each pool should have.", Place.OPEN)
ADAPTER = Adapter(
    routes=(Routes(router, _TAG, keyed=True, order=330),),
    access={
        ("GET", "/admin/v1/scale"): _READ,
        ("GET", "/admin/v1/scale/{pool}"): _READ,
        ("GET", "/admin/v1/scale/{pool}/changes"): _READ,
    },
)
