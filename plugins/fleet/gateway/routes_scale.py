"""routes_scale: GET /admin/v1/scale and /admin/v1/scale/POOL, which KEDA's metrics-api trigger and others read."""

from __future__ import annotations

from fastapi import APIRouter

from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.errors import documented
from millstream.plugins.fleet.gateway import schemas_scale as schemas
from millstream.plugins.fleet.gateway.reporter import LoadReporter
from millstream.services.access.scopes import Need
from millstream.services.access.table import Row

router = APIRouter(prefix="/admin/v1")


@router.get(
    "/scale",
    summary="How many workers each pool should have",
    description="The last decisions of the leading controller, for all gateways and workers of the installation.",
    responses=documented(503),
)
async def list_scale(deps: DepsOf) -> schemas.Scale:
    decisions, _ = await deps.part(LoadReporter).decisions()
    return schemas.scale(decisions)


@router.get(
    "/scale/{pool}",
    summary="How many workers a pool should have, and why",
    description="503 while no controller decides: a scaler keeps what there is, or what its fallback says.",
    responses=documented(404, 503),
)
async def get_scale(pool: str, deps: DepsOf) -> schemas.PoolScale:
    decisions, now = await deps.part(LoadReporter).decisions()
    return schemas.pool_scale(decisions, pool, now)


_READ = Row(Need.READ, admin=True)
_TAG = Tag("admin: scale", "How many workers each pool should have.", Place.OPEN)
ADAPTER = Adapter(
    routes=(Routes(router, _TAG, keyed=True, order=330),),
    access={("GET", "/admin/v1/scale"): _READ, ("GET", "/admin/v1/scale/{pool}"): _READ},
)
