"""GET /ping: the health check of SageMaker for containers, and of TorchServe's clients."""

from __future__ import annotations

from fastapi import APIRouter, Response

from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.openapi import ref, reply
from millstream.gateway.protocols.sagemaker.schemas import Ping

router = APIRouter()


@router.get(
    "/ping",
    summary="Whether requests would be answered",
    responses={
        **reply(ref(Ping), "It answers requests.", example={"status": "Healthy"}),
        **reply(ref(Ping), "Not ready.", example={"status": "Unhealthy"}, status=503),
    },
)
async def ping(deps: DepsOf, response: Response) -> dict[str, str]:
    if deps.ready():
        return {"status": "Healthy"}
    response.status_code = 503
    return {"status": "Unhealthy"}
