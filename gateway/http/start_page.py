"""start_page: GET /: for a browser a page with links, what is served and commands to try; for other clients liveness.

Accept ─> prefers_html ─> page of the snapshot, or {"status": "alive"}
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from html import escape
from typing import Any, Literal
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from millstream.gateway.catalog.snapshot import NO_MODELS, ModelView, Snapshot
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.openapi import JSON, TEXT, content, ref
from millstream.gateway.http.openapi_examples import choose
from millstream.gateway.http.openapi_live import answering_versions
from millstream.gateway.http.page import ICON, page_headers

router = APIRouter()

#: models on the page; the others are counted
MODELS_MAX = 100
#: characters of a body in a command; a longer one would fill the page
_BODY_CHARACTERS_MAX = 800
_CLOSED = "<p>Calls need a key, and only callers with one see the models.</p>"
_HOST = re.compile(r"[A-Za-z0-9.:_\[\]-]{1,255}")
_HTML = "text/html"
_STYLE = """
:root { color-scheme: light dark; --edge: #c4ccd4; --quiet: #55606b; --link: #0b57a4; --code: #eef2f6; }
@media (prefers-color-scheme: dark) { :root { --edge: #3c4650; --quiet: #a4b0bc; --link: #8ab8f0; --code: #1e262e; } }
body { margin: 0 auto; max-width: 52rem; padding: 1.5rem 1rem 3rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; }
h2 { margin: 2rem 0 0.5rem; font-size: 1.15rem; }
a { color: var(--link); }
a:focus-visible, pre:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
p { margin: 0.4rem 0; }
.quiet { color: var(--quiet); }
ul { margin: 0.4rem 0; padding-left: 1.2rem; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 0.35rem 0.75rem 0.35rem 0; border-bottom: 1px solid var(--edge); text-align: left; }
td { overflow-wrap: anywhere; }
pre { margin: 0.3rem 0 0.9rem; padding: 0.7rem; overflow-x: auto; border-radius: 6px; background: var(--code); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 0.875rem/1.45 ui-monospace, monospace; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = page_headers(style=f"'sha256-{_STYLE_HASH}'", img="data:") | {"vary": "Accept"}
_LINKS = (
    ("docs", "HTTP API", "all calls, with examples to send"),
    ("openapi.json", "openapi.json", "the same, to generate clients from"),
    ("metrics", "Metrics", "for Prometheus"),
    ("v2/health/ready", "Readiness", "whether requests are answered"),
    ("v2/health/live", "Liveness", "whether the process answers"),
    ("v2/models", "Models", "names, as JSON"),
)


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


@router.get(
    "/",
    summary="The process answers",
    description="A browser gets a page with links, the models and commands to try.",
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
    address = _address(request.url.scheme, request.headers.get("host"))
    closed = deps.gate.enforced
    shown = NO_MODELS if closed else deps.catalog.snapshot  # this page needs no key: it names no model
    key = closed or bool(deps.settings.admin_key)
    page = start_page(deps.version, shown, address, ready=deps.ready(), key=key, closed=closed)
    return Response(page, media_type=_HTML, headers=_HEADERS)


def start_page(version: str, snapshot: Snapshot, address: str, *, ready: bool, key: bool, closed: bool = False) -> str:
    """Return the page.

    Args:
        version: Millstream's version.
        snapshot: the models.
        address: scheme, host and port, for commands.
        ready: whether requests are answered.
        key: whether operators have a key; else the token of the home is shown.
        closed: whether calls need a key, so that the models are not shown.
    """
    state = "Ready: requests are answered." if ready else "Not ready: no recent inference came back."
    links = "".join(
        f'<li><a href="{path}">{name}</a>: <span class="quiet">{what}</span></li>' for path, name, what in _LINKS
    )
    commands = "".join(
        f'<p>{escape(what)}</p><pre tabindex="0"><code>{escape(line)}</code></pre>'
        for what, line in _commands(snapshot, address, key=key)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millstream</title>
<link rel="icon" href="{ICON}">
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Millstream <small class="quiet">{escape(version)}</small></h1>
<p>{state}</p>
<h2>Models</h2>
{_CLOSED if closed else _models(snapshot)}
<h2>Links</h2>
<ul>{links}</ul>
<h2>Try</h2>
{commands}
</main>
</body>
</html>
"""


def _models(snapshot: Snapshot) -> str:
    """Return the table of the models that have a serving version, by name: those that GET /v2/models lists."""
    names = sorted(name for name, view in snapshot.models.items() if view.serving is not None)
    if not names:
        return "<p>No model is loaded yet.</p>"
    rows = "".join(_row(snapshot.models[name]) for name in names[:MODELS_MAX])
    more = f"<p>{len(names) - MODELS_MAX} more models are not shown.</p>" if len(names) > MODELS_MAX else ""
    head = '<tr><th scope="col">Name</th><th scope="col">Version</th><th scope="col">State</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>{more}"


def _row(model: ModelView) -> str:
    version = model.versions.get(model.serving) if model.serving is not None else None
    state = "" if version is None else str(version.state)
    name = f'<a href="v2/models/{quote(model.name)}">{escape(model.name)}</a>'
    return f"<tr><td>{name}</td><td>{model.serving}</td><td>{escape(state)}</td></tr>"


def _commands(snapshot: Snapshot, address: str, *, key: bool) -> list[tuple[str, str]]:
    """Return what to try: a line on what it does, and the command."""
    commands = []
    answering = answering_versions(snapshot)
    if answering:
        example = choose(answering, name_target=False).model
        url = f"{address}/v2/models/{quote(example.model)}"
        body = orjson.dumps(example.bodies["v2"]).decode() if "v2" in example.bodies else ""
        if 0 < len(body) <= _BODY_CHARACTERS_MAX:
            commands.append((f"Send a request to {example.model}:", f"curl -s {url}/infer -d {shlex.quote(body)}"))
        else:
            commands.append((f"Inputs and outputs of {example.model}:", f"curl -s {url}"))
    header = '"Authorization: Bearer $MILLSTREAM_ADMIN_KEY"' if key else "@.millstream/run/token"
    upload = f"curl -H {header} -T model.onnx {shlex.quote(f'{address}/admin/v1/models/mine/versions/1?wait=60')}"
    commands.append(("Upload a model, and wait until it answers:", upload))
    commands.append(("The same, and more, with the command:", "millstream push mine model.onnx\nmillstream models"))
    return commands


def _address(scheme: str, host: str | None) -> str:
    """Return the address as the browser knows it. A host that is not one is not repeated in commands."""
    known: Any = host if host is not None and _HOST.fullmatch(host) else "127.0.0.1:8000"
    return f"{scheme}://{known}"
