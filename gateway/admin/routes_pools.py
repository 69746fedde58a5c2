"""GET /admin/v1/pools and /admin/v1/workers: who serves."""

from __future__ import annotations

import time

from fastapi import APIRouter, Depends

from millstream.gateway.admin import schemas
from millstream.gateway.protocols.http.auth import admin
from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.errors import documented

router = APIRouter(
    prefix="/admin/v1", tags=["admin: pools"], dependencies=[Depends(admin)], responses=documented(401, 403)
)


@router.get("/pools", summary="Worker pools and how much of each is ready")
async def pools(deps: DepsOf) -> schemas.Pools:
    return schemas.pools(deps.catalog.snapshot)


@router.get("/workers", summary="Live workers and what each of them holds")
async def workers(deps: DepsOf) -> schemas.WorkerList:
    return schemas.workers(deps.catalog.snapshot, time.time())  # noqa: TID251 - the board brought heartbeats to this clock
