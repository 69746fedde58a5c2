"""TorchServe's inference calls: /predictions, and the description of the API at the paths that its clients use."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from millstream.gateway.connection.error_reply import unicode_text
from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.gateway.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import Advice, ErrorFormat, FormattedError, documented
from millstream.gateway.http.openapi import BINARY, JSON, OCTETS, content, reply, request_body
from millstream.gateway.http.operation import document
from millstream.gateway.scheduling.caller import infer_arrays
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.tensors.examples import value_body
from millstream.gateway.tensors.forms import CSV, JSON_LINES, NPY, media_type
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.outputs import size_of
from millstream.gateway.tensors.prepared import PreparedPlans, gives_media, read_prepared
from millstream.plugins.compat.torchserve import routes_management, schemas
from millstream.plugins.compat.torchserve.documents import find, plain, unknown_version
from millstream.plugins.compat.torchserve.predictions import (
    Prediction,
    begins_json,
    handled,
    handler_answer,
    is_handled,
    only_part,
    read,
    write,
)
from millstream.services.access.scopes import LIST, Need, Row
from millstream.services.errors import Code, Failure, Subject
from millstream.services.process.threads import run_in_thread_if_large

router = APIRouter()

_BODY = request_body(
    {
        JSON: content({"description": "A row, rows, or an object {input: value}."}, form="rows"),
        OCTETS: BINARY,
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"data": {"type": "string", "format": "binary"}},
                "additionalProperties": {"type": "string", "format": "binary"},
            }
        },
        JSON_LINES: content({"type": "string", "description": "A row each line."}),
        CSV: content({"type": "string"}, form="csv"),
        NPY: BINARY,
    },
    description="A row or rows as JSON, lines of JSON, CSV or numpy's format, the bytes of the only input, or a form.",
)
_ANSWERS = reply(
    {"description": "The only output, or an object {output: value}; a single row without a list of rows."},
    "The answer of the model.",
    example=[0.9, 0.1],
) | documented(400, 404, 413, 415, 429, 500, 503, 504)


@router.post(
    "/predictions/{model}",
    summary="Run the serving version",
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_BODY,
)
async def torchserve_predict(model: str, request: Request, deps: DepsOf) -> Response:
    return await _predict(model, None, request, deps)


@router.post(
    "/predictions/{model}/{version}",
    summary="Run one version",
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_BODY,
)
async def torchserve_predict_version(model: str, version: str, request: Request, deps: DepsOf) -> Response:
    return await _predict(model, version, request, deps)


@router.post("/explanations/{model}", summary="Not supported", status_code=501, responses=documented(501))
async def torchserve_explain(model: str) -> None:
    raise Failure(Code.UNSUPPORTED, f"explanations are not supported: post to /predictions/{model}")


_DESCRIPTION = reply({"type": "object"}, "This document.")


@router.get("/ping", include_in_schema=False)  # where SageMaker's is off
async def torchserve_ping(deps: DepsOf, response: Response) -> dict[str, str]:
    ready = deps.ready()
    response.status_code = 200 if ready else 503
    return {"status": "Healthy" if ready else "Unhealthy"}


@router.options(
    "/",
    summary="Description of the API",
    name="torchserve_root_description",
    responses=_DESCRIPTION,
    response_class=Response,
)
@router.get("/api-description", summary="Description of the API", responses=_DESCRIPTION, response_class=Response)
async def torchserve_description(request: Request) -> Response:
    return await document(request)


def _route(deps: Deps, model: str, version: str | None) -> ModelRoute:
    find(deps.catalog.snapshot, model, version)
    try:
        return deps.caller("torchserve").find(model, None if version is None else plain(version))
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            raise
        raise unknown_version(model, version) from None


#: of bodies that a model wrote: a browser runs nothing of them, and takes them for what they say
_OF_A_MODEL = {"content-security-policy": "sandbox", "x-content-type-options": "nosniff"}


async def _predict(model: str, version: str | None, request: Request, deps: Deps) -> Response:
    route = _route(deps, model, version)
    async with decompressed_body(request, deps) as body:
        return await cancel_on_disconnect(request, _answer(route, request.headers.get("content-type", ""), body, deps))


async def _answer(route: ModelRoute, content_type: str, body: bytes, deps: Deps) -> Response:
    caller = deps.caller("torchserve")
    if is_handled(route.plans.signature):
        with caller.count_rejections(route, value_body):
            given = handled(route.plans, content_type, body)
        answer, media, status = handler_answer(await infer_arrays(caller, route, given))
        return Response(answer, status, _OF_A_MODEL, media)
    with caller.count_rejections(route, value_body):
        (inputs, single), prepared = await run_in_thread_if_large(len(body), _read, route.plans, content_type, body)
        if prepared is not None:
            inputs = await prepared.prepare(inputs.tensors)
    outputs = await infer_arrays(caller, route, inputs)
    text = await run_in_thread_if_large(size_of(outputs), write, route.plans.signature, outputs, single=single)
    return Response(text, media_type="application/json")


def _read(plans: InputPlans, content_type: str, body: bytes) -> tuple[Prediction, PreparedPlans | None]:
    """Return the inputs in a body, and what prepares them; a body of plain text is a text. Raises Failure."""
    given = gives_media(plans, media_type(content_type)) and not begins_json(body)
    part = only_part(content_type, body)
    return read_prepared(plans, lambda one: read(one, content_type, body), given=given, body=part)


_TYPES = {
    Code.INVALID: "BadRequestException",
    Code.UNAUTHENTICATED: "InvalidKeyException",
    Code.FORBIDDEN: "InvalidKeyException",
    Code.NOT_FOUND: "ResourceNotFoundException",
    Code.METHOD: "MethodNotAllowedException",
    Code.CONFLICT: "ConflictStatusException",
    Code.OVERLOADED: "ServiceUnavailableException",
    Code.UNAVAILABLE: "ServiceUnavailableException",
    Code.MEMORY: "ServiceUnavailableException",
    Code.EXPIRED: "RequestTimeoutException",
    Code.MODEL: "PredictionException",
    Code.INTERNAL: "InternalServerException",
}
_NOT_FOUND_TYPES: dict[Subject | None, str] = {
    Subject.MODEL: "ModelNotFoundException",
    Subject.VERSION: "ModelVersionNotFoundException",
}


class TorchServeError(Advice):
    """The body of every error: status, type, and what is wrong."""

    code: int
    type: str
    message: str


def _write(error: Failure, status: int) -> FormattedError:
    kind = _TYPES.get(error.code, "BadRequestException")
    if error.code is Code.NOT_FOUND:
        kind = _NOT_FOUND_TYPES.get(error.subject, kind)
    document = {"code": status, "type": kind, "message": unicode_text(error.message)}
    document |= error.advice or {}
    return FormattedError(status, {}, orjson.dumps(document))


FORMAT = ErrorFormat(_write, TorchServeError)


_TAG = Tag("TorchServe", "Predictions, and the management of models from files of this machine.")

_MODEL = "/models/{model}"
_RUN, _DESCRIBE, _WRITE = Row(Need.INFER, "model"), Row(Need.DESCRIBE, "model"), Row(Need.WRITE, "model", changes=True)

ADAPTER = Adapter(
    routes=(
        Routes(router, _TAG, order=130),
        Routes(routes_management.router, _TAG, keyed=True, order=130),
    ),
    access={
        ("POST", "/predictions/{model}"): _RUN,
        ("POST", "/predictions/{model}/{version}"): _RUN,
        ("POST", "/explanations/{model}"): _RUN,
        ("GET", "/ping"): Row(Need.OPEN),
        ("GET", "/api-description"): Row(Need.OPEN),
        ("OPTIONS", "/"): Row(Need.OPEN),
        ("GET", "/models"): LIST,
        ("POST", "/models"): Row(Need.WRITE, changes=True),
        ("GET", _MODEL): _DESCRIBE,
        ("GET", f"{_MODEL}/all"): _DESCRIBE,
        ("GET", f"{_MODEL}/{{version}}"): _DESCRIBE,
        ("PUT", _MODEL): _WRITE,
        ("PUT", f"{_MODEL}/{{version}}"): _WRITE,
        ("PUT", f"{_MODEL}/{{version}}/set-default"): _WRITE,
        ("DELETE", _MODEL): _WRITE,
        ("DELETE", f"{_MODEL}/{{version}}"): _WRITE,
    },
    protocols=("torchserve",),
    error_format=FORMAT,
    error_paths=("/predictions/", "/explanations/", "/models", "/ping", "/api-description"),
    schemas=schemas.SCHEMAS,
)
