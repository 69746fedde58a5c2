"""SageMaker's calls: of a container (/invocations), and of the runtime API as boto3 makes them (/endpoints/…)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.gateway.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import (
    BINARY,
    JSON,
    OCTETS,
    TEXT,
    content,
    header_parameter,
    header_ref,
    ref,
    reply,
    request_body,
)
from millstream.gateway.http.shared_documents import PredictReply, PredictRequest
from millstream.gateway.scheduling.caller import Caller, RequestOptions, infer_arrays
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.tensors import forms
from millstream.gateway.tensors.examples import infer_body, rows_body
from millstream.gateway.tensors.forms import CSV, JSON_LINES, NPY
from millstream.gateway.tensors.hugging_face import check_parameters, gives_texts, write_labels
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.outputs import size_of
from millstream.gateway.tensors.prepared import PreparedPlans, gives_media, gives_prepared, read_prepared
from millstream.gateway.v2.decode import decode_prepared, parse_header_length
from millstream.gateway.v2.responder import V2Encoder
from millstream.gateway.v2.schemas import InferReply, InferRequest
from millstream.plugins.compat.sagemaker.bodies import (
    EVENT_STREAM,
    PREFIX,
    accepted_form,
    header_bytes_of,
    is_v2,
    payload_parts,
)
from millstream.plugins.compat.sagemaker.dataframes import check_params, is_dataframe, read_dataframe, with_predictions
from millstream.plugins.compat.sagemaker.errors import FORMAT
from millstream.plugins.compat.sagemaker.settings import SageMakerSettings
from millstream.plugins.compat.sagemaker.target import default_model, named_model, variant_version
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import Code, Failure, invalid, not_found
from millstream.services.process.threads import run_in_thread_if_large
from millstream.services.settings import settings_of


class Ping(TypedDict):
    """Whether requests would be answered."""

    status: Literal["Healthy", "Unhealthy"]


class DataFrameSplit(TypedDict):
    """A pandas DataFrame in the orientation `split`."""

    columns: NotRequired[list[Any]]
    index: NotRequired[list[Any]]
    data: list[list[Any]]


class DataFrameRequest(TypedDict):
    """A DataFrame, as clients of MLflow send it: give one of the two."""

    dataframe_split: NotRequired[DataFrameSplit]
    dataframe_records: NotRequired[list[dict[str, Any]]]
    params: NotRequired[dict[str, Any]]


SCHEMAS = (Ping, DataFrameRequest)


router = APIRouter()

_ECHOED = ("x-amzn-sagemaker-custom-attributes", "x-amzn-sagemaker-inference-id")
_ECHOED_CHARACTERS_MAX = 1024
_TRITON_BINARY = "application/vnd.sagemaker-triton.binary+json"

_ANY_FORM: dict[str, Any] = {
    "description": "Row or column form, a list of rows, a request of v2, or a DataFrame as MLflow sends it.",
    "anyOf": [ref(PredictRequest), {"type": "array", "items": {}}, ref(InferRequest), ref(DataFrameRequest)],
}
_CONTENT: dict[str, Any] = {
    JSON: content(_ANY_FORM, form="instances"),
    JSON_LINES: content({"type": "string", "description": "A row each line, as in `instances`."}),
    CSV: content({"type": "string"}, form="csv"),
    NPY: BINARY,
    OCTETS: BINARY,
    _TRITON_BINARY: BINARY,
}


def _body(*parameters: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": [*parameters, _TARGET_VARIANT], **request_body(_CONTENT)}


_TARGET_VARIANT = header_parameter("X-Amzn-SageMaker-Target-Variant", "The version; left out: the serving one.")
_TARGET_MODEL = header_parameter("X-Amzn-SageMaker-Target-Model", "The model, in place of the default.")
_FORMS: dict[str, Any] = {
    JSON: content({"anyOf": [ref(PredictReply), ref(InferReply)]}, example={"predictions": [[0.9, 0.1]]}),
    JSON_LINES: TEXT,
    CSV: TEXT,
    NPY: BINARY,
    OCTETS: BINARY,
    _TRITON_BINARY: BINARY,
}
_INVOKED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer of the model, in the form that the client accepts.",
        "headers": {"X-Amzn-Invoked-Production-Variant": header_ref("X-Amzn-Invoked-Production-Variant")},
        "content": _FORMS,
    }
}
_ANSWERS: dict[int | str, dict[str, Any]] = {**_INVOKED, **documented(400, 404, 406, 413, 429, 500, 501, 503, 504)}
_RUNTIME_ERRORS = documented(400, 413, 424, 429, 500, 501, 503)


@router.post(
    "/invocations",
    summary="Run the default model",
    description="The model is MILLSTREAM_SAGEMAKER_MODEL, the only one there is, or X-Amzn-SageMaker-Target-Model. "
    "MLflow's bodies are taken, too: dataframe_split, dataframe_records, instances, inputs.",
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_body(_TARGET_MODEL),
)
async def invocations(request: Request, deps: DepsOf) -> Response:
    snapshot = deps.catalog.snapshot
    model = named_model(snapshot, request.headers) or default_model(
        snapshot, settings_of(deps.settings, SageMakerSettings).sagemaker_model
    )
    return await invoke(request, deps, model)


@router.post(
    "/endpoints/{endpoint}/invocations",
    summary="InvokeEndpoint: run the model of this name",
    description="Target-Model names another one, Target-Variant a version. Signatures are not checked.",
    response_class=Response,
    responses={**_INVOKED, **_RUNTIME_ERRORS},
    openapi_extra=_body(_TARGET_MODEL),
)
async def invoke_endpoint(endpoint: str, request: Request, deps: DepsOf) -> Response:
    return await invoke(request, deps, named_model(deps.catalog.snapshot, request.headers) or endpoint)


@router.post(
    "/endpoints/{endpoint}/invocations-response-stream",
    summary="InvokeEndpointWithResponseStream: the same, as events PayloadPart",
    response_class=Response,
    responses={
        200: {"description": "Events PayloadPart.", "content": {EVENT_STREAM: BINARY}},
        **_RUNTIME_ERRORS,
    },
    openapi_extra=_body(_TARGET_MODEL),
)
async def invoke_endpoint_with_response_stream(
    endpoint: str,
    request: Request,
    deps: DepsOf,
    accept: Annotated[str | None, Header(alias="x-amzn-sagemaker-accept")] = None,
) -> Response:
    model = named_model(deps.catalog.snapshot, request.headers) or endpoint
    reply = await invoke(request, deps, model, accept)
    headers = {name: value for name, value in reply.headers.items() if name.startswith("x-amzn-")}
    headers["x-amzn-sagemaker-content-type"] = reply.headers["content-type"]
    return Response(payload_parts(bytes(reply.body)), headers=headers, media_type=EVENT_STREAM)


@router.post(
    "/endpoints/{endpoint}/async-invocations",
    summary="InvokeEndpointAsync: not supported",
    status_code=501,
    responses=documented(501),
)
async def invoke_endpoint_async(endpoint: str) -> None:
    raise Failure(
        Code.UNSUPPORTED, f"asynchronous invocations are not supported yet: call InvokeEndpoint of '{endpoint}'"
    )


@router.post(
    "/models/{model}/invoke",
    summary="Run a model of a multi-model container",
    description="The calls that load and unload models are TorchServe's, below the same path.",
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_body(),
)
async def invoke_model(model: str, request: Request, deps: DepsOf) -> Response:
    try:
        return await invoke(request, deps, model)
    except Failure as failure:
        if failure.code is Code.MEMORY:  # SageMaker unloads another model and tries again
            raise Failure(Code.STORAGE, failure.message) from None
        if failure.code is not Code.NOT_FOUND:
            raise
        raise not_found(failure.message) from None  # no subject, which TorchServe's format, used here, would show


async def invoke(
    request: Request, deps: Deps, model: str, accept: str | None = None, caller: Caller | None = None
) -> Response:
    """Run `model` on the request's body in any supported form, and reply in the form that the client accepts.

    Args:
        request: the request; its body is not read yet.
        deps: the parts of the gateway.
        model: name of the model.
        accept: the accepted forms, as in an Accept header; None: the request's Accept header.
        caller: of the protocol that the metrics name; None: SageMaker's.

    Raises:
        Failure: of any kind. INVALID for a content type or encoding that is not supported: the reference container
            refuses bodies with 400 only.
        HTTPException: 406.
    """
    caller = caller or deps.caller("sagemaker")
    route = caller.find(model, variant_version(request.headers))
    try:
        async with decompressed_body(request, deps) as body:
            reply = await cancel_on_disconnect(request, _reply(request, caller, route, body, accept))
    except Failure as failure:
        if failure.code is Code.ENCODING:
            raise invalid(failure.message) from None
        raise
    reply.headers["x-amzn-invoked-production-variant"] = str(route.lane.manifest.version)
    for name in _ECHOED:
        value = request.headers.get(name)
        if value is not None and len(value) <= _ECHOED_CHARACTERS_MAX and value.isascii() and value.isprintable():
            reply.headers[name] = value
    return reply


async def _reply(request: Request, caller: Caller, route: ModelRoute, body: bytes, accept: str | None) -> Response:
    content_type = request.headers.get("content-type", "")
    with caller.count_rejections(route, rows_body):
        header_bytes = header_bytes_of(content_type)
    if header_bytes is not None:
        return _v2_reply(*await _infer_v2(caller, route, body, header_bytes))
    if forms.media_type(content_type) == OCTETS:
        return await _octets(request, caller, route, body)
    form = accepted_form(accept or request.headers.get("accept"))
    if form is None:
        raise HTTPException(
            406,
            "none of the forms in Accept can be given; these can: "
            f"{forms.JSON}, {forms.JSON_LINES}, {forms.CSV}, {forms.NPY}",
        )
    parsed: forms.ParsedBody | None = None
    document: Any = None
    prepared: PreparedPlans | None = None
    with caller.count_rejections(route, rows_body):
        if forms.media_type(content_type) in {forms.JSON, forms.JSON_LINES}:
            limits = route.plans.json_limits
            document = await run_in_thread_if_large(len(body), forms.parse_document, content_type, body, limits)
            if not is_v2(document):
                parsed, prepared = await run_in_thread_if_large(len(body), _parsed, route, document)
        else:
            parsed, prepared = await run_in_thread_if_large(len(body), _read, route.plans, content_type, body)
        if parsed is not None and prepared is not None:
            parsed = parsed._replace(inputs=await prepared.prepare(parsed.inputs.tensors))
    if parsed is None:
        return _v2_reply(*await _infer_v2(caller, route, body, None))
    outputs = await infer_arrays(caller, route, parsed.inputs)
    signature = route.plans.signature
    if form == forms.JSON and gives_texts(document) and (labels := write_labels(signature, outputs)) is not None:
        return _with_type(labels, form)
    text = await run_in_thread_if_large(
        size_of(outputs), forms.write, signature, outputs, form, row_form=parsed.row_form
    )
    if form == forms.JSON and not parsed.row_form:
        text = with_predictions(text)
    return _with_type(text, form)


def _read(plans: InputPlans, content_type: str, body: bytes) -> tuple[forms.ParsedBody, PreparedPlans | None]:
    """Return the inputs in a body that is no JSON, and what prepares them. Raises Failure: INVALID, ENCODING."""
    if plans.prepared is not None and gives_media(plans, forms.media_type(content_type)):
        return forms.ParsedBody(plans.prepared.one(body), row_form=True), plans.prepared
    return forms.reader(content_type)(plans, body), None


def _parsed(route: ModelRoute, document: Any) -> tuple[forms.ParsedBody, PreparedPlans | None]:
    """Return the inputs of a JSON document, and what prepares them. Raises Failure(INVALID)."""
    check_params(document)
    if gives_texts(document):
        check_parameters(route.lane.manifest, document)
    if is_dataframe(document):
        return read_prepared(
            route.plans, lambda plans: forms.ParsedBody(read_dataframe(plans, document), row_form=True)
        )
    given = gives_prepared(route.plans, document)
    return read_prepared(route.plans, lambda plans: forms.from_json(plans, document), given=given)


async def _infer_v2(
    caller: Caller, route: ModelRoute, body: bytes, header_bytes: int | None
) -> tuple[bytes, int | None]:
    """Run the request in `body`; return the body of its reply and the length of that body's JSON part.

    Args:
        caller: of the protocol on whose path the request came.
        route: the version's route.
        body: the body of the request.
        header_bytes: length of its JSON part; None, here and in the result: the whole body is JSON.

    Raises:
        Failure: of any kind.
    """
    with caller.count_rejections(route, infer_body):
        call = await decode_prepared(route.plans, route.decoder, body, header_bytes)
    inputs, options = call
    manifest = route.lane.manifest
    encoder = V2Encoder(manifest.model, manifest.version, manifest.answered, route.extensions)
    request_options = RequestOptions(options.timeout_s, options.priority)
    return await caller.call(
        route, inputs, options.rows, len(body), lambda reply: encoder.encode(options, reply), request_options
    )


def _v2_reply(text: bytes, header_bytes: int | None) -> Response:
    """Return a reply of JSON, or of JSON and binary outputs; then the content type has the length of the JSON."""
    return Response(text, media_type=forms.JSON if header_bytes is None else f"{PREFIX}{header_bytes}")


async def _octets(request: Request, caller: Caller, route: ModelRoute, body: bytes) -> Response:
    """Answer a v2 request with binary tensors, announced by Triton's own header."""
    length = request.headers.get("inference-header-content-length")
    with caller.count_rejections(route, infer_body):
        header_bytes = 0 if length is None else parse_header_length(length.encode("latin-1"))
    text, written = await _infer_v2(caller, route, body, header_bytes)
    if written is None:
        return Response(text, media_type=forms.JSON)
    return Response(text, media_type=OCTETS, headers={"inference-header-content-length": str(written)})


def _with_type(text: bytes, form: str) -> Response:
    # As a header: the framework would add a charset to the media type of texts.
    return Response(text, headers={"content-type": form})


ping_router = APIRouter()


@ping_router.get(
    "/ping",
    summary="Whether requests would be answered",
    responses={
        **reply(ref(Ping), "It answers requests.", example={"status": "Healthy"}),
        **reply(ref(Ping), "Not ready.", example={"status": "Unhealthy"}, status=503),
    },
)
async def ping(deps: DepsOf, response: Response) -> dict[str, str]:
    if deps.ready():
        return {"status": "Healthy"}
    response.status_code = 503
    return {"status": "Unhealthy"}


@ping_router.get(
    "/version",
    summary="Version of Millstream, for MLflow's client",
    response_class=PlainTextResponse,
    responses={200: {"description": "The version.", "content": {"text/plain": TEXT}}},
)
async def server_version(deps: DepsOf) -> PlainTextResponse:
    return PlainTextResponse(deps.version)


_TAG = Tag("SageMaker", "The calls of SageMaker's containers, and its runtime API for boto3.")

_RUN = Row(Need.INFER)  # the model is in a header, or is the default one

ADAPTER = Adapter(
    routes=(Routes(ping_router, _TAG, order=110), Routes(router, _TAG, order=110)),
    access={
        ("GET", "/ping"): Row(Need.OPEN),
        ("GET", "/version"): Row(Need.OPEN),
        ("POST", "/invocations"): _RUN,
        ("POST", "/endpoints/{endpoint}/invocations"): _RUN,
        ("POST", "/endpoints/{endpoint}/invocations-response-stream"): _RUN,
        ("POST", "/endpoints/{endpoint}/async-invocations"): _RUN,
        ("POST", "/models/{model}/invoke"): Row(Need.INFER, "model"),
    },
    protocols=("sagemaker",),
    error_format=FORMAT,
    error_paths=("/endpoints/",),  # a container's own errors have the plain format
    schemas=SCHEMAS,
)
