"""Liveness, the metrics page, the OpenAPI page and document: calls for operators, of no protocol.

No page loads anything from elsewhere: Swagger UI comes from an installed package, so that /docs works offline.
Addresses in pages are relative, so that they work below a path of a reverse proxy.
"""

from __future__ import annotations

import asyncio
from importlib.resources import files
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from typing_extensions import TypedDict

from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.http.compression import choose_encoding, compress
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.openapi import JSON, TEXT, content, ref
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import not_found

_router = APIRouter(include_in_schema=False)
_start, _metrics = APIRouter(), APIRouter()
_PAGES = Path(__file__).parent / "pages"


def page_headers(**sources: str) -> dict[str, str]:
    """Return the headers of a page.

    Args:
        sources: what the page may load, by directive of Content-Security-Policy without `-src`. All else is refused.
    """
    directives = ["default-src 'none'", *(f"{kind}-src {source}" for kind, source in sources.items())]
    directives += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return {
        "content-security-policy": "; ".join(directives),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


_DOCS_HEADERS = page_headers(
    script="'self'",
    style="'self' 'unsafe-inline'",  # Swagger UI sets styles of elements
    img="'self' data:",
    connect="'self'",
)
#: name -> the folder that has it
_ASSETS = {
    "page.js": _PAGES,
    "page.css": _PAGES,
    **dict.fromkeys(("swagger-ui-bundle.js", "swagger-ui.css"), Path(str(files("fastapi_offline"))) / "static"),
}


class Alive(TypedDict):
    """The process answers."""

    status: Literal["alive"]


@_start.get(
    "/",
    summary="The process answers",
    responses={
        200: {"description": "It is alive.", "content": {JSON: content(ref(Alive), example={"status": "alive"})}}
    },
    response_model=None,
)
async def root() -> Response:
    return Response(b'{"status":"alive"}', media_type=JSON, headers={"vary": "Accept"})


@_router.get("/openapi.json")
async def document(request: Request) -> Response:
    text = await asyncio.to_thread(request.app.openapi_json)
    return Response(text, media_type=JSON, headers={"cache-control": "no-cache"})


@_router.get("/docs")
async def docs() -> HTMLResponse:
    return HTMLResponse((_PAGES / "docs.html").read_text(), headers=_DOCS_HEADERS)


@_router.get("/docs/assets/{name}")
async def asset(name: str) -> Response:
    if name not in _ASSETS:
        raise not_found("Not Found")
    return FileResponse(_ASSETS[name] / name)


@_metrics.get(
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


_TAG = Tag("operation", "For operators of the server.", Place.OPEN)

ADAPTER = Adapter(
    routes=(
        Routes(_start, _TAG, order=400),
        Routes(_metrics, _TAG, order=400),
        Routes(_router, order=400),
    ),
    access={
        **{("GET", path): Row(Need.OPEN) for path in ("/", "/openapi.json", "/docs", "/docs/assets/{name}")},
        ("GET", "/metrics"): Row(Need.METRICS),
    },
    schemas=(Alive,),
)
