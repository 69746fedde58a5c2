"""GET /metrics, for Prometheus; the Accept header chooses the text format, Accept-Encoding compresses it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from millstream.gateway.http.compression import choose_encoding, compress
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.openapi import TEXT

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
    headers = {"content-type": content_type, "vary": "accept, accept-encoding"}
    encoding = choose_encoding(request.headers.get("accept-encoding", "").encode("latin-1"))
    if encoding is not None:
        page = await asyncio.to_thread(compress, page, encoding)
        headers["content-encoding"] = encoding.decode()
    return Response(page, headers=headers)
