"""GET /ping: the health check of SageMaker for containers, and of TorchServe's clients."""

from __future__ import annotations

from fastapi import APIRouter, Response

from millstream.gateway.protocols.http.context import DepsOf

router = APIRouter()


@router.get(
    "/ping",
    summary="Whether requests would be answered",
    responses={
        200: {"content": {"application/json": {"example": {"status": "Healthy"}}}},
        503: {"description": "Not ready.", "content": {"application/json": {"example": {"status": "Unhealthy"}}}},
    },
)
async def ping(deps: DepsOf, response: Response) -> dict[str, str]:
    if deps.ready():
        return {"status": "Healthy"}
    response.status_code = 503
    return {"status": "Unhealthy"}
