"""GET /v2, /v2/health/live, /v2/health/ready: server metadata, liveness and readiness."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.openapi import ref, reply
from millstream.gateway.v2 import metadata
from millstream.gateway.v2.schemas import ServerLive, ServerMetadata, ServerReady
from millstream.services.version import VERSION

router = APIRouter()


@router.get(
    "/v2",
    summary="Name, version and protocol extensions of the server",
    responses=reply(ref(ServerMetadata), "The server.", example=metadata.server_metadata(VERSION, metadata.EXTENSIONS)),
)
@router.get("/v2/", include_in_schema=False)
async def server_metadata(deps: DepsOf) -> dict[str, Any]:
    return metadata.server_metadata(deps.version, metadata.extensions())


@router.get(
    "/v2/health/live",
    summary="The process answers",
    responses=reply(ref(ServerLive), "It is live.", example={"live": True}),
)
async def server_live() -> dict[str, Any]:
    return {"live": True}


@router.get(
    "/v2/health/ready",
    summary="Whether a recent readiness probe came back through the queue",
    responses={
        **reply(ref(ServerReady), "It is ready.", example={"ready": True}),
        **reply(
            ref(ServerReady),
            "Not ready.",
            example={"ready": False, "error": "the server is not ready: no recent inference came back"},
            status=503,
        ),
    },
)
async def server_ready(deps: DepsOf, response: Response) -> dict[str, Any]:
    if deps.ready():
        return {"ready": True}
    response.status_code = 503
    why = "models of the start are being loaded" if deps.preloading() else "no recent inference came back"
    return {"ready": False, "error": f"the server is not ready: {why}"}
