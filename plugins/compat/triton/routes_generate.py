"""POST /v2/models/{model}[/versions/{version}]/generate and generate_stream, calls with plain JSON."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from millstream.gateway.http.adapter import versioned
from millstream.gateway.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import content, json_body, ref, reply
from millstream.gateway.scheduling.caller import infer_arrays
from millstream.gateway.tensors.examples import generate_body
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.outputs import size_of
from millstream.gateway.tensors.prepared import PreparedPlans, read_prepared
from millstream.plugins.compat.triton.generate import GenerateRequest as ReadRequest
from millstream.plugins.compat.triton.generate import event, read, write
from millstream.plugins.compat.triton.schemas import GenerateReply, GenerateRequest
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
_EVENT = {"description": "Server-sent events. The data of the only event is a GenerateReply as JSON."}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The outputs, as one event.", "content": {"text/event-stream": content(_EVENT)}},
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
        "Run the serving version, and reply with a stream of one event",
        "Run one version, and reply with a stream of one event",
    ),
    response_class=Response,
    responses=_STREAM,
    openapi_extra=_BODY,
)
async def generate_stream(model: str, version: str | None, request: Request, deps: DepsOf) -> Response:
    text = await _generate(model, version, request, deps)
    return Response(event(text), headers={"content-type": _EVENTS, "cache-control": "no-cache"})


async def _generate(model: str, version: str | None, request: Request, deps: Deps) -> bytes:
    async with decompressed_body(request, deps) as body:
        return await cancel_on_disconnect(request, _answer(model, version, body, deps))


async def _answer(model: str, version: str | None, body: bytes, deps: Deps) -> bytes:
    route = deps.caller("generate").find(model, version)
    with deps.caller("generate").count_rejections(route, generate_body):
        prompt, prepared = await run_in_thread_if_large(len(body), _read, route.plans, body)
        inputs = prompt.inputs
        if prepared is not None:
            inputs = await prepared.prepare(inputs.tensors)
    outputs = await infer_arrays(deps.caller("generate"), route, inputs, prompt.options)
    return await run_in_thread_if_large(size_of(outputs), write, route.lane.manifest, prompt.id, outputs)


def _read(plans: InputPlans, body: bytes) -> tuple[ReadRequest, PreparedPlans | None]:
    """Return the request, and what prepares it. Raises Failure(INVALID)."""
    return read_prepared(plans, lambda one: read(one, body))
