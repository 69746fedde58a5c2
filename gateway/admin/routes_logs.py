"""routes_logs: GET and PUT /admin/v1/log-level: how much the processes of the installation log."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from millstream.gateway.admin.schemas_logs import LogLevels
from millstream.gateway.http.body import DOCUMENT_BYTES_MAX, read_body
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body
from millstream.gateway.tensors.json_document import parse_json
from millstream.services.errors import invalid
from millstream.services.process.audit import audit
from millstream.services.process.log_level import KINDS, LEVELS

router = APIRouter(prefix="/admin/v1")


@router.get("/log-level", summary="How much the processes of the installation log", responses=documented(503))
async def get_log_level(deps: DepsOf) -> LogLevels:
    return LogLevels(**await deps.log_levels.read())


@router.put(
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
