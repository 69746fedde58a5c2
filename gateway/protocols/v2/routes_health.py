"""routes_health: GET /v2, /v2/health/live, /v2/health/ready: server metadata, liveness and readiness."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.v2.metadata import server_metadata

router = APIRouter()


@router.get("/v2", summary="Name, version and protocol extensions of the server")
@router.get("/v2/", include_in_schema=False)
async def server(deps: DepsOf) -> dict[str, Any]:
    return server_metadata(deps.settings.server_name, deps.version)


@router.get(
    "/v2/health/live",
    summary="The process answers",
    responses={200: {"content": {"application/json": {"example": {"live": True}}}}},
)
async def live() -> dict[str, Any]:
    return {"live": True}


@router.get(
    "/v2/health/ready",
    summary="Whether a recent readiness probe came back through the queue",
    responses={
        200: {"content": {"application/json": {"example": {"ready": True}}}},
        503: {
            "description": "Not ready.",
            "content": {"application/json": {"example": {"ready": False, "error": "no recent inference came back"}}},
        },
    },
)
async def ready(deps: DepsOf, response: Response) -> dict[str, Any]:
    if deps.ready():
        return {"ready": True}
    response.status_code = 503
    return {"ready": False, "error": "the server is not ready: no recent inference came back"}
