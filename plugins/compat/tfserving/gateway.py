"""/v1/models…: TensorFlow Serving's REST API and KServe's V1 protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from millstream.gateway.catalog.snapshot import name_excerpt, visible
from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.gateway.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import PLAIN, documented
from millstream.gateway.http.openapi import JSON, content, ref, reply, request_body
from millstream.gateway.http.shared_documents import ModelList, PredictReply, PredictRequest, model_list
from millstream.gateway.scheduling.caller import infer_arrays
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.tensors.examples import BodyWriter, rows_body
from millstream.gateway.tensors.hugging_face import check_parameters, gives_texts
from millstream.gateway.tensors.input_plans import InputPlans, Inputs
from millstream.gateway.tensors.outputs import OutputTensor, size_of
from millstream.gateway.tensors.prepared import PreparedPlans, gives_prepared, read_prepared
from millstream.gateway.tensors.rows_json import read_predict, write_predict
from millstream.plugins.compat.tfserving import documents, schemas
from millstream.plugins.compat.tfserving.cloud_events import close_event, open_event
from millstream.plugins.compat.tfserving.lookup import find_route, find_view, version_of_label
from millstream.plugins.compat.tfserving.predict import (
    classify_body,
    of_classes,
    read_document,
    read_examples,
    regress_body,
    write_classes,
    write_values,
)
from millstream.plugins.compat.tfserving.schemas import (
    ClassifyReply,
    CloudEvent,
    ExamplesRequest,
    ModelStatus,
    RegressReply,
    SignatureMetadata,
)
from millstream.services.access.scopes import LIST, Need, Row
from millstream.services.errors import Code, Failure
from millstream.services.process.threads import run_in_thread_if_large

router = APIRouter()

Writer = Callable[[list[OutputTensor]], bytes]


class Reader(NamedTuple):
    """How a call reads its body. `example`: the form of a body that works, for callers whose body does not."""

    read: Callable[[ModelRoute, InputPlans, dict[str, Any]], tuple[Inputs, Writer]]
    example: BodyWriter


class _Parsed(NamedTuple):
    """A body. `prepared`: prepares the inputs, which are no tensors yet."""

    inputs: Inputs
    write: Writer
    prepared: PreparedPlans | None = None


_EVENT = "application/cloudevents+json"
_ERRORS = documented(400, 404, 413, 415, 429, 500, 503, 504)


def _body(schema: dict[str, str], form: str) -> dict[str, Any]:
    return request_body({JSON: content(schema, form=form), _EVENT: content(ref(CloudEvent))})


def _answers(schema: dict[str, str], example: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the replies of a call. A CloudEvent is answered with one."""
    contents = {JSON: content(schema, example=example), _EVENT: content(ref(CloudEvent))}
    return {200: {"description": "The answer of the model.", "content": contents}, **_ERRORS}


_PREDICT = _body(ref(PredictRequest), "instances")
_PREDICTED = _answers(ref(PredictReply), {"predictions": [[0.9, 0.1]]})
_EXAMPLES = _body(ref(ExamplesRequest), "examples")
_CLASSIFIED = _answers(ref(ClassifyReply), {"result": [[["0", 0.9], ["1", 0.1]]]})
_REGRESSED = _answers(ref(RegressReply), {"result": [0.7]})
_METADATA = reply(ref(SignatureMetadata), "The signature.") | documented(404)
_STATUS: dict[int | str, dict[str, Any]] = {
    **reply(ref(ModelStatus), "It is ready."),
    **documented(404),
    **reply(ref(ModelStatus), "Not ready.", status=503),
}


@router.get(
    "/v1/models",
    summary="Models that answer requests, for KServe's and OpenAI's clients",
    responses=reply(ref(ModelList), "The models."),
)
async def v1_list_models(deps: DepsOf) -> dict[str, Any]:
    return model_list(visible(deps.catalog.snapshot))


@router.get("/v1/models/{model}", summary="State of a model's versions", responses=_STATUS)
async def v1_model_status(model: str, deps: DepsOf, response: Response) -> dict[str, Any]:
    return _status(deps, model, None, response)


@router.get("/v1/models/{model}/versions/{version}", summary="State of one version", responses=_STATUS)
async def v1_model_status_version(model: str, version: str, deps: DepsOf, response: Response) -> dict[str, Any]:
    return _status(deps, model, version, response)


@router.get("/v1/models/{model}/labels/{label}", summary="State of the version with a label", responses=_STATUS)
async def v1_model_status_label(model: str, label: str, deps: DepsOf, response: Response) -> dict[str, Any]:
    return _status(deps, model, version_of_label(label), response)


@router.get("/v1/models/{model}/metadata", summary="Signature of the serving version", responses=_METADATA)
async def v1_model_metadata(model: str, deps: DepsOf) -> dict[str, Any]:
    return documents.model_metadata(find_view(deps, model, None)[1].manifest)


@router.get("/v1/models/{model}/versions/{version}/metadata", summary="Signature of one version", responses=_METADATA)
async def v1_model_metadata_version(model: str, version: str, deps: DepsOf) -> dict[str, Any]:
    return documents.model_metadata(find_view(deps, model, version)[1].manifest)


@router.get(
    "/v1/models/{model}/labels/{label}/metadata",
    summary="Signature of the version with a label",
    responses=_METADATA,
)
async def v1_model_metadata_label(model: str, label: str, deps: DepsOf) -> dict[str, Any]:
    return documents.model_metadata(find_view(deps, model, version_of_label(label))[1].manifest)


def _read_predict(route: ModelRoute, plans: InputPlans, document: dict[str, Any]) -> tuple[Inputs, Writer]:
    inputs, row_form = read_predict(plans, document)
    return inputs, lambda outputs: write_predict(route.plans.signature, outputs, row_form=row_form)


def _read_classify(route: ModelRoute, plans: InputPlans, document: dict[str, Any]) -> tuple[Inputs, Writer]:
    return read_examples(plans, document), lambda outputs: write_classes(*of_classes(route.extensions, outputs))


def _read_regress(_: ModelRoute, plans: InputPlans, document: dict[str, Any]) -> tuple[Inputs, Writer]:
    return read_examples(plans, document), write_values


def _add(call: str, does: str, read: Reader, body: dict[str, Any], answers: dict[int | str, dict[str, Any]]) -> None:
    """Add the three paths of a call: for the serving version, for one version, and for the version with a label."""

    async def serving(model: str, request: Request, deps: DepsOf) -> Response:
        return await _run(model, None, read, request, deps)

    async def one(model: str, version: str, request: Request, deps: DepsOf) -> Response:
        return await _run(model, version, read, request, deps)

    async def labelled(model: str, label: str, request: Request, deps: DepsOf) -> Response:
        return await _run(model, version_of_label(label), read, request, deps)

    for where, endpoint, name, which in (
        ("", serving, f"v1_{call}", "the serving version"),
        ("/versions/{version}", one, f"v1_{call}_version", "one version"),
        (
            "/labels/{label}",
            labelled,
            f"v1_{call}_label",
            "the version with a label (`serving`, `stable`: the one that answers)",
        ),
    ):
        router.add_api_route(
            f"/v1/models/{{model}}{where}:{call}",
            endpoint,
            methods=["POST"],
            name=name,
            response_class=Response,
            summary=f"{does}: {which}",
            responses=answers,
            openapi_extra=body,
        )


_add("predict", "Run", Reader(_read_predict, rows_body), _PREDICT, _PREDICTED)
_add("classify", "Classes and scores of examples", Reader(_read_classify, classify_body), _EXAMPLES, _CLASSIFIED)
_add("regress", "A value for each example", Reader(_read_regress, regress_body), _EXAMPLES, _REGRESSED)


@router.post("/v1/models/{model}:explain", summary="Not offered", responses=documented(501), status_code=501)
async def v1_explain(model: str) -> None:
    raise Failure(Code.UNSUPPORTED, f"explanations are not supported: ask '{name_excerpt(model)}' with :predict")


def _status(deps: Deps, model: str, version: str | None, response: Response) -> dict[str, Any]:
    view, wanted = find_view(deps, model, version)
    ready = wanted.available and deps.answering(wanted.manifest.content_id)
    if not ready:
        response.status_code = 503
    return documents.model_status(view, wanted, ready=ready, all_versions=version is None)


async def _run(model: str, version: str | None, read: Reader, request: Request, deps: Deps) -> Response:
    async with decompressed_body(request, deps) as body:
        return await cancel_on_disconnect(request, _answer(model, version, read, request, body, deps))


async def _answer(model: str, version: str | None, read: Reader, request: Request, body: bytes, deps: Deps) -> Response:
    route = find_route(deps, model, version)
    with deps.caller("tfserving").count_rejections(route, read.example):
        event, data = await run_in_thread_if_large(
            len(body), open_event, request.headers, body, route.plans.json_limits
        )
        parsed = await run_in_thread_if_large(len(data), _parsed, route, read, data)
        inputs = parsed.inputs
        if parsed.prepared is not None:
            inputs = await parsed.prepared.prepare(inputs.tensors)
    outputs = await infer_arrays(deps.caller("tfserving"), route, inputs)
    text = await run_in_thread_if_large(size_of(outputs), parsed.write, outputs)
    if event is None:
        return Response(text, media_type="application/json")
    headers, text = close_event(event, model, text)
    return Response(text, headers=headers)


def _parsed(route: ModelRoute, read: Reader, data: bytes) -> _Parsed:
    document = read_document(data, route.plans.json_limits)
    if gives_texts(document):
        check_parameters(route.lane.manifest, document)
    parsed, prepared = read_prepared(
        route.plans, lambda plans: read.read(route, plans, document), given=gives_prepared(route.plans, document)
    )
    return _Parsed(*parsed, prepared=prepared)


_TAG = Tag("v1: TensorFlow Serving, KServe", "The REST API of TensorFlow Serving, and KServe's V1.")


def _rows() -> Iterator[tuple[tuple[str, str], Row]]:
    run, describe = Row(Need.INFER, "model"), Row(Need.DESCRIBE, "model")
    yield ("GET", "/v1/models"), LIST
    for version in ("", "/versions/{version}", "/labels/{label}"):
        path = f"/v1/models/{{model}}{version}"
        yield ("GET", path), describe
        yield ("GET", f"{path}/metadata"), describe
        for call in ("predict", "classify", "regress"):
            yield ("POST", f"{path}:{call}"), run
    yield ("POST", "/v1/models/{model}:explain"), run


ADAPTER = Adapter(
    routes=(Routes(router, _TAG, order=100),),
    access=dict(_rows()),
    protocols=("tfserving",),
    error_format=PLAIN,
    error_paths=("/v1/models",),  # the other paths below /v1 are OpenAI's
    schemas=schemas.SCHEMAS,
)
