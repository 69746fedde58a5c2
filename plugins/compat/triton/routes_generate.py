"""POST /v2/models/{model}[/versions/{version}]/generate and generate_stream, calls with plain JSON."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from millstream.gateway.http.adapter import versioned
from millstream.gateway.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import content, json_body, ref, reply
from millstream.gateway.http.part_events import PartEvents, only_part
from millstream.gateway.scheduling.caller import infer_arrays
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.tensors.examples import generate_body
from millstream.gateway.tensors.input_plans import InputPlans, Inputs
from millstream.gateway.tensors.outputs import size_of
from millstream.gateway.tensors.prepared import PreparedPlans, read_prepared
from millstream.plugins.compat.triton.generate import GenerateRequest as ReadRequest
from millstream.plugins.compat.triton.generate import event, read, write
from millstream.plugins.compat.triton.schemas import GenerateReply, GenerateRequest
from millstream.services.errors import Failure
from millstream.services.process.threads import run_in_thread_if_large

router = APIRouter()

_EVENTS = "text/event-stream; charset=utf-8"
_BODY = json_body(GenerateRequest, form="generate")
_ERRORS = documented(400, 404, 413, 415, 429, 500, 501, 503, 504)
_ANSWER = (
    reply(
        ref(GenerateReply),
        "The outputs, as members.",
        example={"y": [0.9, 0.1], "model_name": "digits", "model_version": "1"},
    )
    | _ERRORS
)
#: no type: tools differ on whether a schema is of the whole stream or of an event
_EVENT = {
    "description": "Server-sent events, one for each part of the answer. The data of each is a GenerateReply as JSON, "
    'or {"error": "…"} where the stream ends with an error.'
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The outputs, as events.", "content": {"text/event-stream": content(_EVENT)}},
    **_ERRORS,
}


@versioned(
    router,
    "POST",
    "/v2/models/{model}[/versions/{version}]/generate",
    ("Run the serving version on a plain JSON object", "Run one version on a plain JSON object"),
    response_class=Response,
    responses=_ANSWER,
    openapi_extra=_BODY,
)
async def generate(model: str, version: str | None, request: Request, deps: DepsOf) -> Response:
    return Response(await _generate(model, version, request, deps), media_type="application/json")


@versioned(
    router,
    "POST",
    "/v2/models/{model}[/versions/{version}]/generate_stream",
    (
        "Run the serving version, and reply with a stream of events, one for each part of the answer",
        "Run one version, and reply with a stream of events, one for each part of the answer",
    ),
    response_class=Response,
    responses=_STREAM,
    openapi_extra=_BODY,
)
async def generate_stream(model: str, version: str | None, request: Request, deps: DepsOf) -> Response:
    async with decompressed_body(request, deps) as body:
        route, prompt, inputs = await cancel_on_disconnect(request, _prompt(model, version, body, deps))
    stream = deps.caller("generate").stream(route, inputs, inputs.size_bytes, prompt.options)
    manifest = route.lane.manifest
    events = PartEvents(stream, lambda outputs: event(write(manifest, prompt.id, outputs)), _error_event)
    return await cancel_on_disconnect(request, events.response(_EVENTS))


def _error_event(failure: Failure) -> bytes:
    return event(orjson.dumps({"error": failure.message}))


async def _generate(model: str, version: str | None, request: Request, deps: Deps) -> bytes:
    async with decompressed_body(request, deps) as body:
        return await cancel_on_disconnect(request, _answer(model, version, body, deps))


async def _prompt(model: str, version: str | None, body: bytes, deps: Deps) -> tuple[ModelRoute, ReadRequest, Inputs]:
    """Return the route and the request in a body, with its inputs prepared. Raises Failure."""
    route = deps.caller("generate").find(model, version)
    with deps.caller("generate").count_rejections(route, generate_body):
        prompt, prepared = await run_in_thread_if_large(len(body), _read, route.plans, body)
        inputs = prompt.inputs
        if prepared is not None:
            inputs = await prepared.prepare(inputs.tensors)
    return route, prompt, inputs


async def _answer(model: str, version: str | None, body: bytes, deps: Deps) -> bytes:
    route, prompt, inputs = await _prompt(model, version, body, deps)
    caller, manifest = deps.caller("generate"), route.lane.manifest
    if manifest.streams:
        outputs = await only_part(caller.stream(route, inputs, inputs.size_bytes, prompt.options))
    else:
        outputs = await infer_arrays(caller, route, inputs, prompt.options)
    return await run_in_thread_if_large(size_of(outputs), write, manifest, prompt.id, outputs)


def _read(plans: InputPlans, body: bytes) -> tuple[ReadRequest, PreparedPlans | None]:
    """Return the request, and what prepares it. Raises Failure(INVALID)."""
    return read_prepared(plans, lambda one: read(one, body))
