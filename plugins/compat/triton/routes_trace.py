"""/v2/trace/setting, /v2/models/{model}/trace/setting and /v2/logging: Triton's trace and logging extensions.

GET is open; POST is protected as the admin API.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from millstream.gateway.http.body import declared_bytes
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body, ref, reply
from millstream.gateway.tensors.json_text import parse_json
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.schemas import LogSettings, LogSettingsChange, TraceSettings, TraceSettingsChange
from millstream.plugins.compat.triton.shared_settings import when_unlocked
from millstream.services.errors import Code, Failure

router = APIRouter()
protected = APIRouter()

BODY_BYTES_MAX = 64 * 1024
_TRACE = reply(ref(TraceSettings), "The trace settings in force.")
_LOG = reply(ref(LogSettings), "The log settings in force.")
_CHANGE_ERRORS = documented(400, 413, 501, 503, 507)
_TRACE_CHANGE = json_body(TraceSettingsChange, required=False, example={"trace_rate": "100"})
_LOG_CHANGE = json_body(LogSettingsChange, required=False, example={"log_verbose_level": 1})


@router.get("/v2/trace/setting", summary="Trace settings of all models", responses=_TRACE)
async def trace_settings(deps: DepsOf) -> dict[str, Any]:
    return dict(deps.part(Triton).traces.get(None))


@protected.post(
    "/v2/trace/setting",
    summary="Change the trace settings of all models",
    responses=_TRACE | _CHANGE_ERRORS,
    openapi_extra=_TRACE_CHANGE,
)
async def update_trace_settings(request: Request, deps: DepsOf) -> dict[str, Any]:
    values = await _object(request)
    return dict(await when_unlocked(lambda: deps.part(Triton).traces.update(None, values)))


@router.get(
    "/v2/models/{model}/trace/setting",
    summary="Trace settings of a model",
    responses=_TRACE | documented(400),
)
async def model_trace_settings(model: str, deps: DepsOf) -> dict[str, Any]:
    return dict(deps.part(Triton).traces.get(model))


@protected.post(
    "/v2/models/{model}/trace/setting",
    summary="Change the trace settings of a model",
    responses=_TRACE | _CHANGE_ERRORS,
    openapi_extra=_TRACE_CHANGE,
)
async def update_model_trace_settings(model: str, request: Request, deps: DepsOf) -> dict[str, Any]:
    values = await _object(request)
    return dict(await when_unlocked(lambda: deps.part(Triton).traces.update(model, values)))


@router.get("/v2/logging", summary="Log settings of the gateways", responses=_LOG)
async def log_settings(deps: DepsOf) -> dict[str, Any]:
    return dict(deps.part(Triton).logs.get())


@protected.post(
    "/v2/logging",
    summary="Change the log settings of the gateways",
    responses=_LOG | _CHANGE_ERRORS,
    openapi_extra=_LOG_CHANGE,
)
async def update_log_settings(request: Request, deps: DepsOf) -> dict[str, Any]:
    values = await _object(request)
    return dict(await when_unlocked(lambda: deps.part(Triton).logs.update(values)))


async def _object(request: Request) -> dict[str, Any]:
    """Return the settings in the body; an empty body is {} and changes nothing. Raises Failure: INVALID, TOO_LARGE."""
    body = b""
    if declared_bytes(request) <= BODY_BYTES_MAX:
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                break
    if len(body) > BODY_BYTES_MAX or declared_bytes(request) > BODY_BYTES_MAX:
        raise Failure(Code.TOO_LARGE, f"settings are larger than {BODY_BYTES_MAX} bytes")
    return parse_json(body) if body else {}
