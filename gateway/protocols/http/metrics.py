"""metrics: GET /metrics, for Prometheus; the Accept header chooses the text format."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.openapi import TEXT

router = APIRouter()


@router.get(
    "/metrics",
    summary="Metrics in Prometheus' text format, or OpenMetrics when accepted",
    response_class=Response,
    responses={
        200: {"description": "The metrics.", "content": {"text/plain": TEXT, "application/openmetrics-text": TEXT}}
    },
)
async def metrics(request: Request, deps: DepsOf) -> Response:
    page, content_type = await deps.metrics(request.headers.get("accept"))
    return Response(page, headers={"content-type": content_type})
