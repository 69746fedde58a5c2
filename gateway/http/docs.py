"""The pages for browsers: GET / with links, GET /docs with the OpenAPI document; and the document, GET /openapi.json.

No page loads anything from elsewhere: Swagger UI comes from an installed package, so that /docs works offline.
"""

from __future__ import annotations

import asyncio
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from typing_extensions import TypedDict

from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.openapi import JSON, TEXT, content, ref
from millstream.services.errors import not_found

router = APIRouter(include_in_schema=False)
start = APIRouter()

#: the icon of the pages, as a URL
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='3' fill='%230b57a4'/%3E"
    "%3Cpath d='M2 6q3-3 6 0t6 0M2 11q3-3 6 0t6 0' fill='none' stroke='%23fff' stroke-width='1.5'/%3E%3C/svg%3E"
)


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


_ASSETS = ("swagger-ui-bundle.js", "swagger-ui.css")
_HTML = "text/html"
_START_HEADERS = page_headers(style="'self'", img="data:") | {"vary": "Accept"}
_HEADERS = page_headers(
    script="'self'",
    style="'self' 'unsafe-inline'",  # Swagger UI sets styles of elements
    img="'self' data:",
    connect="'self'",
)
_HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millstream</title>
<link rel="icon" href="{_ICON}">
"""
# Addresses are relative, so that pages work below a path of a reverse proxy.
_DOCS = f"""{_HEAD}<link rel="stylesheet" href="docs/assets/swagger-ui.css">
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
:root { color-scheme: light dark; }
body { margin: 0; }
main, nav { padding: 0.75rem 1.25rem; font: 1rem/1.5 system-ui, sans-serif; }
main { margin: 0 auto; max-width: 52rem; }
main pre { font: 0.875rem/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
main a, nav a { color: light-dark(#0b57a4, #8ab8f0); }
.dark-mode body { background: #1c2022; }
"""
_OWN_ASSETS = {"page.js": (_SCRIPT, "text/javascript"), "page.css": (_STYLE, "text/css")}


class Alive(TypedDict):
    """The process answers."""

    status: Literal["alive"]


def prefers_html(accept: str | None) -> bool:
    """Return whether an Accept header names HTML, and does not prefer JSON. Wildcards, as curl sends, mean JSON."""
    wanted = {}
    for part in (accept or "").split(","):
        media_type, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((piece[2:] for piece in parameters if piece.startswith("q=")), "1")
        try:
            wanted[media_type] = float(quality)
        except ValueError:
            wanted[media_type] = 0.0
    return wanted.get(_HTML, 0.0) > 0 and wanted[_HTML] >= wanted.get(JSON, 0.0)


@start.get(
    "/",
    summary="The process answers",
    description="A browser gets a page with links.",
    responses={
        200: {
            "description": "It is alive.",
            "content": {JSON: content(ref(Alive), example={"status": "alive"}), _HTML: TEXT},
        }
    },
    response_model=None,
)
async def root(request: Request, deps: DepsOf) -> Response:
    if not prefers_html(request.headers.get("accept")):
        return Response(b'{"status":"alive"}', media_type=JSON, headers={"vary": "Accept"})
    return HTMLResponse(start_page(deps.version, ready=deps.ready()), headers=_START_HEADERS)


def start_page(version: str, *, ready: bool) -> str:
    """Return the page with links."""
    state = "Ready: requests are answered." if ready else "Not ready: no recent inference came back."
    return f"""{_HEAD}<link rel="stylesheet" href="docs/assets/page.css">
</head>
<body>
<main>
<h1>Millstream {escape(version)}</h1>
<p>{state}</p>
<ul>
<li><a href="docs">HTTP API</a>: all calls, with examples to send
<li><a href="openapi.json">openapi.json</a>: the same, to generate clients from
<li><a href="v2/models">Models</a>: names, as JSON
<li><a href="metrics">Metrics</a>: for Prometheus
<li><a href="v2/health/ready">Readiness</a>: whether requests are answered
<li><a href="v2/health/live">Liveness</a>: whether the process answers
</ul>
<p>Upload a model, and see what is served:</p>
<pre tabindex="0"><code>millstream push NAME model.onnx
millstream models</code></pre>
</main>
</body>
</html>
"""


@router.get("/openapi.json")
async def document(request: Request) -> Response:
    text = await asyncio.to_thread(request.app.openapi_json)
    return Response(text, media_type=JSON, headers={"cache-control": "no-cache"})


@router.get("/docs")
async def page() -> HTMLResponse:
    return HTMLResponse(_DOCS, headers=_HEADERS)


@router.get("/docs/assets/{name}")
async def asset(name: str) -> Response:
    own = _OWN_ASSETS.get(name)
    if own is not None:
        text, media_type = own
        return Response(text, media_type=media_type)
    if name not in _ASSETS:
        raise not_found("Not Found")
    return FileResponse(Path(str(files("fastapi_offline"))) / "static" / name)
