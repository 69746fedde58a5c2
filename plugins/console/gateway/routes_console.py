"""The routes of the console: its page with what that loads, the session, and what only the console asks for."""

from __future__ import annotations

import asyncio
import mimetypes
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel

from millstream.gateway.access.principal import CALLER
from millstream.gateway.http.adapter import Adapter, Routes
from millstream.gateway.http.body import read_document
from millstream.gateway.http.compression import choose_encoding
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.operation import page_headers
from millstream.plugins.console.gateway import prometheus
from millstream.plugins.console.gateway.event_stream import EventStream
from millstream.plugins.console.gateway.hub import Hub
from millstream.plugins.console.gateway.log_files import LogFilter, LogTail, newest, processes
from millstream.plugins.console.gateway.prometheus import HOURS_MAX
from millstream.plugins.console.gateway.session import (
    LOGS,
    READ,
    WATCH,
    SessionMiddleware,
    cookie_of,
    is_secure,
    session_document,
    who_is,
)
from millstream.plugins.console.settings import ConsoleSettings
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import Code, Failure, not_found
from millstream.services.process.threads import in_storage_thread
from millstream.services.settings import settings_of

_STATIC = Path(__file__).resolve().parents[1] / "static"
_PAGE_HEADERS = page_headers(
    script="'self'", style="'self'", img="'self' data: blob:", media="data:", connect="'self'", font="'self'"
)
#: The build puts a digest into the names of assets: their content never changes.
_ASSET_HEADERS = {"cache-control": "public, max-age=31536000, immutable", "x-content-type-options": "nosniff"}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}
_NOT_STORED = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

router = APIRouter(include_in_schema=False)


def _filter_of(process: str = "", level: str = "", text: str = "", before: float | None = None) -> LogFilter:
    return LogFilter(process, level.upper(), text, before)


_Wanted = Annotated[LogFilter, Depends(_filter_of)]


@router.get("/console")
async def to_page() -> Response:
    return Response(status_code=307, headers={"location": "console/"})  # relative: a proxy may have added a path


@router.get("/console/")
async def page(request: Request) -> Response:
    return _file(request, _STATIC, "index.html", _PAGE_HEADERS)


@router.get("/console/icon.svg")
async def icon(request: Request) -> Response:
    return _file(request, _STATIC, "icon.svg", _PAGE_HEADERS)


@router.get("/console/assets/{name}")
async def asset(name: str, request: Request) -> Response:
    return _file(request, _STATIC / "assets", name, _ASSET_HEADERS)


def _file(request: Request, folder: Path, name: str, headers: dict[str, str]) -> Response:
    """Return a file, compressed by the build where the client takes that. Raises Failure(NOT_FOUND)."""
    names = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    if name not in names or name.endswith(".gz"):
        raise not_found("Not Found")
    suffix = Path(name).suffix
    kind = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = headers | {"vary": "Accept-Encoding"}
    accepted = choose_encoding(request.headers.get("accept-encoding", "").encode("latin-1"))
    if accepted == b"gzip" and f"{name}.gz" in names:
        name, headers = f"{name}.gz", headers | {"content-encoding": "gzip"}
    return FileResponse(folder / name, media_type=kind, headers=headers)


class _SignIn(BaseModel):
    key: str


@router.get("/console/api/session")
async def session(request: Request, deps: DepsOf) -> Response:
    return _json(session_document(deps, _credential(request), prometheus=_prometheus(deps) is not None))


@router.post("/console/api/session")
async def sign_in(request: Request, deps: DepsOf) -> Response:
    key = (await read_document(request, _SignIn)).key.strip()
    if who_is(deps.gate, b"Bearer " + key.encode()) is None:
        deps.count_refusal("not_authorized")
        raise Failure(Code.UNAUTHENTICATED, "no such key: it is mistyped, was revoked, or has expired")
    return Response(status_code=204, headers={"set-cookie": cookie_of(key, secure=is_secure(request.scope))})


@router.delete("/console/api/session")
async def sign_out(request: Request) -> Response:
    return Response(status_code=204, headers={"set-cookie": cookie_of("", secure=is_secure(request.scope))})


@router.get("/console/api/events")
async def events(request: Request, deps: DepsOf, wanted: _Wanted, logs: bool = False) -> Response:
    caller = CALLER.get() or who_is(deps.gate, _credential(request))  # without keys nobody has looked at the credential
    if logs and caller is None:
        raise Failure(Code.UNAUTHENTICATED, "logs need a key: sign in")
    if logs and caller is not None:
        caller.require(LOGS.need)
    return EventStream(deps.part(Hub), deps.gate, caller, LogTail(_logs(deps), wanted) if logs else None)


@router.get("/console/api/history")
async def history(
    deps: DepsOf, model: str | None = None, hours: Annotated[float | None, Query(gt=0, le=HOURS_MAX)] = None
) -> Response:
    if model is not None:
        model = deps.catalog.snapshot.model(model).name
        if (caller := CALLER.get()) is not None:
            caller.require(Need.READ, model)
    url = _prometheus(deps)
    if hours is not None and url is not None:
        if model is None and _sees() is not None:
            raise Failure(Code.FORBIDDEN, "this key does not read all models: name one")
        async with deps.part(Hub).asking:
            return _json(await asyncio.to_thread(prometheus.history, url, hours, model))
    epoch = time.time() - time.monotonic()  # noqa: TID251 - instants for people
    return _json(deps.part(Hub).history.document(epoch, model, _sees()))


@router.get("/console/api/requests")
async def requests(deps: DepsOf) -> Response:
    return _json(await deps.part(Hub).calls.calls(_sees()))


@router.get("/console/api/logs")
async def logs(deps: DepsOf, wanted: _Wanted) -> Response:
    folder = _logs(deps)
    lines = await in_storage_thread(newest, folder, wanted)
    return _json({"lines": lines, "processes": await in_storage_thread(processes, folder)})


def _prometheus(deps: Deps) -> str | None:
    return settings_of(deps.settings, ConsoleSettings).console_prometheus_url


def _logs(deps: Deps) -> Path:
    return deps.settings.home / "logs"


def _sees() -> Callable[[str], bool] | None:
    """Return what says of a model whether the caller may read it; None: the caller may read all."""
    caller = CALLER.get()
    return None if caller is None or caller.sees_all(Need.READ) else partial(caller.grants.allows, Need.READ)


def _credential(request: Request) -> bytes | None:
    header = request.headers.get("authorization")
    return None if header is None else header.encode("latin-1")


def _json(document: Any) -> Response:
    return JSONResponse(document, headers=_NOT_STORED)


_OPEN = Row(Need.OPEN)
ADAPTER = Adapter(
    routes=(Routes(router, order=410),),
    access={
        ("GET", "/console"): _OPEN,
        ("GET", "/console/"): _OPEN,
        ("GET", "/console/icon.svg"): _OPEN,
        ("GET", "/console/assets/{name}"): _OPEN,
        ("GET", "/console/api/session"): _OPEN,
        ("POST", "/console/api/session"): _OPEN,
        ("DELETE", "/console/api/session"): _OPEN,
        ("GET", "/console/api/events"): WATCH,
        ("GET", "/console/api/history"): WATCH,
        ("GET", "/console/api/requests"): READ,
        ("GET", "/console/api/logs"): LOGS,
    },
    middleware=(SessionMiddleware,),
)
