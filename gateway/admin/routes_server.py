"""Pools and workers, and how much the processes of the installation log (/admin/v1/log-level)."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from millstream.gateway.admin import schemas_pools as schemas
from millstream.gateway.catalog.snapshot import visible
from millstream.gateway.http.body import DOCUMENT_BYTES_MAX, read_body
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body
from millstream.gateway.tensors.json_document import parse_json
from millstream.services.access.scopes import Need
from millstream.services.errors import invalid
from millstream.services.process.audit import audit
from millstream.services.process.log_level import KINDS, LEVELS

Level = Literal["debug", "info", "warning", "error"]


class LogLevels(BaseModel):
    """The least level of the records that processes log, by kind; null: the default, info."""

    gateway: Level | None = Field(None, description="Of the gateways of the installation.")
    worker: Level | None = Field(None, description="Of the workers of the installation.")
    controller: Level | None = Field(None, description="Of the controllers of the installation.")


pools_router = APIRouter(prefix="/admin/v1")
logs_router = APIRouter(prefix="/admin/v1")


@pools_router.get("/pools", summary="Worker pools and how much of each is ready")
async def list_pools(deps: DepsOf) -> schemas.Pools:
    return schemas.pools(visible(deps.catalog.snapshot, Need.READ))


@pools_router.get("/workers", summary="Live workers and the versions in each")
async def list_workers(deps: DepsOf) -> schemas.WorkerList:
    return schemas.workers(visible(deps.catalog.snapshot, Need.READ), time.time())  # noqa: TID251 - ClusterState converts heartbeats to this clock


@logs_router.get("/log-level", summary="How much the processes of the installation log", responses=documented(503))
async def get_log_level(deps: DepsOf) -> LogLevels:
    return LogLevels(**await deps.log_levels.read())


@logs_router.put(
    "/log-level",
    summary="Change how much the processes of the installation log",
    description="Kinds that the document leaves out keep their level; null restores the default, info. The processes "
    "of all machines follow within about a second, without a restart, and a process that starts later has the level, "
    "too. All levels are the default again a day after the last change, and when Redis loses its data. A process that "
    "does not reach Redis keeps its level.",
    responses=documented(400, 413, 503),
    openapi_extra=json_body(LogLevels, example={"worker": "debug"}),
)
async def put_log_level(request: Request, deps: DepsOf) -> LogLevels:
    changes = _checked(parse_json(await read_body(request, DOCUMENT_BYTES_MAX)))
    levels = await deps.log_levels.update(changes)
    audit("log levels changed", None, **{kind: level or "default" for kind, level in changes.items()})
    return LogLevels(**levels)


def _checked(document: Any) -> dict[str, str | None]:
    """Return the levels by kind. Raises Failure(INVALID)."""
    if not isinstance(document, dict) or not document:
        raise invalid('send an object like {"worker": "debug"}')
    for kind, level in document.items():
        if kind not in KINDS:
            raise invalid(f"there is no kind of process {str(kind)[:80]!r}; there are: {', '.join(KINDS)}")
        if level is not None and not (isinstance(level, str) and level in LEVELS):
            raise invalid(f"the level of {kind} must be one of {', '.join(LEVELS)}, or null for the default")
    return document
