"""docs: GET /openapi.json, and GET /docs, which shows it with assets of an installed package: it works offline.

The page's sections are folded as the document's tags say, and its examples are for a model that is loaded.
"""

from __future__ import annotations

import asyncio
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse

from millstream.gateway.catalog.snapshot import NO_MODELS
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.page import ICON, page_headers
from millstream.services.errors import not_found

router = APIRouter(include_in_schema=False)

_ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css")
_HEADERS = page_headers(
    script="'self'",
    style="'self' 'unsafe-inline'",  # Swagger UI sets styles of elements
    img="'self' data:",
    connect="'self'",
)
# Addresses are relative, so that the page works below a path of a reverse proxy.
_PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millstream: HTTP API</title>
<link rel="icon" href="{ICON}">
<link rel="stylesheet" href="docs/assets/swagger-ui.css">
<link rel="stylesheet" href="docs/assets/page.css">
</head>
<body>
<noscript><p>This page needs JavaScript. The same as JSON: <a href="openapi.json">openapi.json</a>.</p></noscript>
<nav><a href="./">Start page</a></nav>
<div id="page"></div>
<script src="docs/assets/swagger-ui-bundle.js"></script>
<script src="docs/assets/page.js"></script>
</body>
</html>
"""
_SCRIPT = """\
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
paint();
dark.addEventListener("change", paint);
const ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#page",
  deepLinking: true,
  docExpansion: "none",
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  tryItOutEnabled: true,
  validatorUrl: null,
  onComplete: () => {
    for (const tag of ui.specSelectors.specJson().toJS().tags || []) {
      if (tag["x-open"]) ui.layoutActions.show(["operations-tag", tag.name], true);
    }
  },
});
"""
_STYLE = """\
body { margin: 0; }
nav { padding: 0.75rem 1.25rem; font: 1rem system-ui, sans-serif; }
nav a { color: #0b57a4; }
.dark-mode nav a { color: #8ab8f0; }
.dark-mode body { background: #1c2022; }
"""
_OWN_ASSETS = {"page.js": (_SCRIPT, "text/javascript"), "page.css": (_STYLE, "text/css")}


@router.get("/openapi.json")
async def document(request: Request, deps: DepsOf) -> Response:
    """Return the document. No call makes it again while the models are the same: callers without a key may ask."""
    shown = NO_MODELS if deps.gate.enforced else deps.catalog.snapshot  # this page needs no key: it names no model
    text = await asyncio.to_thread(request.app.state.live_document.text, shown, deps.settings)
    return Response(text, media_type="application/json", headers={"cache-control": "no-cache"})


@router.get("/docs")
async def page() -> HTMLResponse:
    return HTMLResponse(_PAGE, headers=_HEADERS)


@router.get("/docs/assets/{name}")
async def asset(name: str) -> Response:
    own = _OWN_ASSETS.get(name)
    if own is not None:
        text, media_type = own
        return Response(text, media_type=media_type)
    if name not in _ASSETS:
        raise not_found("Not Found")
    return FileResponse(Path(str(files("fastapi_offline"))) / "static" / name)
