"""docs: GET /docs, the OpenAPI page. Its assets come from an installed package, so it works without internet access."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse

from millstream.services.errors import not_found

router = APIRouter(include_in_schema=False)

_ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")


@router.get("/docs")
async def page(request: Request) -> HTMLResponse:
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=request.app.title,
        swagger_js_url="/docs/assets/swagger-ui-bundle.js",
        swagger_css_url="/docs/assets/swagger-ui.css",
        swagger_favicon_url="/docs/assets/favicon.png",
    )


@router.get("/docs/assets/{name}")
async def asset(name: str) -> FileResponse:
    if name not in _ASSETS:
        raise not_found("Not Found")
    return FileResponse(Path(str(files("fastapi_offline"))) / "static" / name)
