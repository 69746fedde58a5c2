"""/v1/models…: TensorFlow Serving's REST API and KServe's V1 protocol; GET /: liveness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from millstream.gateway.catalog.snapshot import ModelView, VersionView, name_excerpt, version_number
from millstream.gateway.protocols.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.protocols.http.context import DepsOf
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.protocols.http.errors import documented
from millstream.gateway.protocols.http.model_list import model_list
from millstream.gateway.protocols.tfserving import documents
from millstream.gateway.protocols.tfserving.cloud_events import close_event, open_event
from millstream.gateway.protocols.tfserving.predict import (
    read_document,
    read_examples,
    servable_not_found,
    write_classes,
    write_values,
)
from millstream.gateway.scheduling.infer_arrays import infer_arrays
from millstream.gateway.scheduling.router import ModelRoute
from millstream.gateway.tensors.outputs import OutputTensor, size_of
from millstream.gateway.tensors.request_inputs import Inputs
from millstream.gateway.tensors.rows_json import read_predict, write_predict
from millstream.services.errors import Code, Failure, not_found
from millstream.services.process.offload import run_in_thread_if_large

router = APIRouter()

#: Labels of the serving version. No other labels exist.
_LABELS = frozenset({"serving", "stable"})

Reader = Callable[[ModelRoute, dict[str, Any]], tuple[Inputs, Callable[[list[OutputTensor]], bytes]]]

_JSON_OBJECT: dict[str, Any] = {"type": "object"}


def _body(required: str, example: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": {required: {}, "signature_name": {"type": "string"}}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def _answers(example: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {
        200: {"content": {"application/json": {"schema": _JSON_OBJECT, "example": example}}},
        **documented(400, 404, 413, 415, 429, 500, 503, 504),
    }


_PREDICT = _body("instances", {"instances": [[0.1, 0.2, 0.3, 0.4]]})
_PREDICTED = _answers({"predictions": [[0.9, 0.1]]})
_EXAMPLES = _body("examples", {"examples": [{"x": [0.1, 0.2, 0.3, 0.4]}]})
_CLASSIFIED = _answers({"result": [[["0", 0.9], ["1", 0.1]]]})
_REGRESSED = _answers({"result": [0.7]})
_SEEN: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": _JSON_OBJECT}}},
    **documented(404),
}
_STATUS: dict[int | str, dict[str, Any]] = {
    **_SEEN,
    503: {"description": "Not ready.", "content": {"application/json": {"schema": _JSON_OBJECT}}},
}


@router.get("/", summary="The process answers")
async def alive() -> dict[str, str]:
    return {"status": "alive"}


@router.get("/v1/models", summary="Models that answer requests, for KServe's and OpenAI's clients")
async def models(deps: DepsOf) -> dict[str, Any]:
    return model_list(deps.catalog.snapshot)


@router.get("/v1/models/{model}", summary="State of a model's versions", responses=_STATUS)
async def status(model: str, deps: DepsOf, response: Response) -> dict[str, Any]:
    return _status(deps, model, None, response)


@router.get("/v1/models/{model}/versions/{version}", summary="State of one version", responses=_STATUS)
async def status_version(model: str, version: str, deps: DepsOf, response: Response) -> dict[str, Any]:
    return _status(deps, model, version, response)


@router.get("/v1/models/{model}/labels/{label}", summary="State of the version with a label", responses=_STATUS)
async def status_label(model: str, label: str, deps: DepsOf, response: Response) -> dict[str, Any]:
    return _status(deps, model, _labelled(label), response)


@router.get("/v1/models/{model}/metadata", summary="Signature of the serving version", responses=_SEEN)
async def metadata(model: str, deps: DepsOf) -> dict[str, Any]:
    return documents.model_metadata(_view(deps, model, None)[1].manifest)


@router.get("/v1/models/{model}/versions/{version}/metadata", summary="Signature of one version", responses=_SEEN)
async def metadata_version(model: str, version: str, deps: DepsOf) -> dict[str, Any]:
    return documents.model_metadata(_view(deps, model, version)[1].manifest)


@router.get(
    "/v1/models/{model}/labels/{label}/metadata", summary="Signature of the version with a label", responses=_SEEN
)
async def metadata_label(model: str, label: str, deps: DepsOf) -> dict[str, Any]:
    return documents.model_metadata(_view(deps, model, _labelled(label))[1].manifest)


def _read_predict(route: ModelRoute, document: dict[str, Any]) -> tuple[Inputs, Callable[[list[OutputTensor]], bytes]]:
    inputs, row_form = read_predict(route.plans, document)
    return inputs, lambda outputs: write_predict(route.plans.signature, outputs, row_form=row_form)


def _read_classify(route: ModelRoute, document: dict[str, Any]) -> tuple[Inputs, Callable[[list[OutputTensor]], bytes]]:
    return read_examples(route.plans, document), lambda outputs: write_classes(outputs, route.extensions.labels[0])


def _read_regress(route: ModelRoute, document: dict[str, Any]) -> tuple[Inputs, Callable[[list[OutputTensor]], bytes]]:
    return read_examples(route.plans, document), write_values


def _add(call: str, does: str, read: Reader, body: dict[str, Any], answers: dict[int | str, dict[str, Any]]) -> None:
    """Add the three paths of a call: for the serving version, for one version, and for the version with a label."""

    async def serving(model: str, request: Request, deps: DepsOf) -> Response:
        return await _run(model, None, read, request, deps)

    async def one(model: str, version: str, request: Request, deps: DepsOf) -> Response:
        return await _run(model, version, read, request, deps)

    async def labelled(model: str, label: str, request: Request, deps: DepsOf) -> Response:
        return await _run(model, _labelled(label), read, request, deps)

    for where, endpoint, which in (
        ("", serving, "the serving version"),
        ("/versions/{version}", one, "one version"),
        ("/labels/{label}", labelled, "the version with a label (`serving`, `stable`: the one that answers)"),
    ):
        router.add_api_route(
            f"/v1/models/{{model}}{where}:{call}",
            endpoint,
            methods=["POST"],
            name=f"{call}_{endpoint.__name__}",
            summary=f"{does}: {which}",
            responses=answers,
            openapi_extra=body,
        )


_add("predict", "Run", _read_predict, _PREDICT, _PREDICTED)
_add("classify", "Classes and scores of examples", _read_classify, _EXAMPLES, _CLASSIFIED)
_add("regress", "A value for each example", _read_regress, _EXAMPLES, _REGRESSED)


@router.post("/v1/models/{model}:explain", summary="Not offered", responses=documented(501), status_code=501)
async def explain(model: str) -> None:
    raise Failure(Code.UNSUPPORTED, f"explanations are not supported: ask '{name_excerpt(model)}' with :predict")


def _labelled(label: str) -> str | None:
    """Return the version of a label: None, the serving one. Raises Failure(NOT_FOUND)."""
    if label in _LABELS:
        return None
    raise not_found(f"Unrecognized servable version label: {name_excerpt(label)}; known: {', '.join(sorted(_LABELS))}")


def _view(deps: Deps, model: str, version: str | None) -> tuple[ModelView, VersionView]:
    try:
        view = deps.catalog.snapshot.model(model)
        return view, view.version(None if version is None else version_number(model, version))
    except Failure:
        raise servable_not_found(model, version) from None


def _status(deps: Deps, model: str, version: str | None, response: Response) -> dict[str, Any]:
    view, wanted = _view(deps, model, version)
    ready = wanted.ready and deps.answering(wanted.manifest.content_id)
    if not ready:
        response.status_code = 503
    return documents.model_status(view, wanted, ready=ready, all_versions=version is None)


def _find(deps: Deps, model: str, version: str | None) -> ModelRoute:
    try:
        return deps.callers.tfserving.find(model, version)
    except Failure as failure:
        if failure.code is not Code.NOT_FOUND:
            raise
        raise servable_not_found(model, version) from None


async def _run(model: str, version: str | None, read: Reader, request: Request, deps: Deps) -> Response:
    async with decompressed_body(request, deps) as body:
        return await cancel_on_disconnect(request, _answer(model, version, read, request, body, deps))


async def _answer(model: str, version: str | None, read: Reader, request: Request, body: bytes, deps: Deps) -> Response:
    route = _find(deps, model, version)
    with deps.callers.tfserving.count_rejections(route):
        event, data = await run_in_thread_if_large(
            len(body), open_event, request.headers, body, route.plans.json_limits
        )
        inputs, write = await run_in_thread_if_large(len(data), _parsed, route, read, data)
    outputs = await infer_arrays(deps.callers.tfserving, route, inputs)
    text = await run_in_thread_if_large(size_of(outputs), write, outputs)
    if event is None:
        return Response(text, media_type="application/json")
    headers, text = close_event(event, model, text)
    return Response(text, headers=headers)


def _parsed(route: ModelRoute, read: Reader, data: bytes) -> tuple[Inputs, Callable[[list[OutputTensor]], bytes]]:
    return read(route, read_document(data, route.plans.json_limits))
