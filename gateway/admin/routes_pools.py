"""routes_pools: GET /admin/v1/pools and /admin/v1/workers."""

from __future__ import annotations

import time

from fastapi import APIRouter

from millstream.gateway.admin import schemas_pools as schemas
from millstream.gateway.catalog.snapshot import visible
from millstream.gateway.http.context import DepsOf
from millstream.services.access.scopes import Need

router = APIRouter(prefix="/admin/v1")


@router.get("/pools", summary="Worker pools and how much of each is ready")
async def list_pools(deps: DepsOf) -> schemas.Pools:
    return schemas.pools(visible(deps.catalog.snapshot, Need.READ))


@router.get("/workers", summary="Live workers and the versions in each")
async def list_workers(deps: DepsOf) -> schemas.WorkerList:
    return schemas.workers(visible(deps.catalog.snapshot, Need.READ), time.time())  # noqa: TID251 - ClusterState converts heartbeats to this clock
