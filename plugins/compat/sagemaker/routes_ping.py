"""GET /ping and /version: the health check of SageMaker's and TorchServe's clients, and what MLflow's client asks."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.openapi import TEXT, ref, reply
from millstream.plugins.compat.sagemaker.schemas import Ping

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


@router.get(
    "/version",
    summary="Version of Millstream, for MLflow's client",
    response_class=PlainTextResponse,
    responses={200: {"description": "The version.", "content": {"text/plain": TEXT}}},
)
async def server_version(deps: DepsOf) -> PlainTextResponse:
    return PlainTextResponse(deps.version)
