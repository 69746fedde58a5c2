"""POST /v1/embeddings, /v1/rerank and /classify, and GET /v1/models, which tfserving has where it is on."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from millstream.gateway.catalog.snapshot import visible
from millstream.gateway.connection.error_reply import unicode_text
from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.gateway.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import Advice, ErrorFormat, FormattedError, documented
from millstream.gateway.http.openapi import json_body, ref, reply
from millstream.gateway.http.shared_documents import model_list
from millstream.gateway.tensors.json_text import JsonLimits
from millstream.plugins.compat.openai.embeddings import Embeddings
from millstream.plugins.compat.openai.ranking import Ranking, read_classify, read_rerank
from millstream.plugins.prepare.gateway.tokenizers import Tokenizers
from millstream.services.access.scopes import LIST, Need, Row
from millstream.services.errors import Code, Failure
from millstream.services.process.threads import run_in_thread_if_large

_TYPES = {
    Code.UNAUTHENTICATED: "authentication_error",
    Code.FORBIDDEN: "permission_error",
    Code.OVERLOADED: "rate_limit_error",
    Code.MODEL: "server_error",
    Code.UNAVAILABLE: "server_error",
    Code.MEMORY: "server_error",
    Code.EXPIRED: "server_error",
    Code.STORAGE: "server_error",
    Code.INTERNAL: "server_error",
}


class OpenAIErrorDetail(Advice):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """The body of every error."""

    error: OpenAIErrorDetail


def _write(error: Failure, status: int) -> FormattedError:
    unknown_model = (
        error.code is Code.NOT_FOUND and error.subject is not None
    )  # the member `model` names the version, too
    document = {
        "message": unicode_text(error.message),
        "type": _TYPES.get(error.code, "invalid_request_error"),
        "param": "model" if unknown_model else None,
        "code": "model_not_found" if unknown_model else None,
        **(error.advice or {}),
    }
    return FormattedError(status, {}, orjson.dumps({"error": document}))


FORMAT = ErrorFormat(_write, OpenAIError)


class EmbeddingsRequest(TypedDict):
    """What to embed."""

    model: Annotated[str, Field(description="NAME, or NAME:VERSION.")]
    input: Annotated[
        str | list[str] | list[int] | list[list[int]], Field(description="Text, token ids, or a list of either.")
    ]
    encoding_format: NotRequired[Literal["float", "base64"]]
    dimensions: NotRequired[Annotated[int, Field(ge=1, description="Elements of a vector; fewer than the model's.")]]
    user: NotRequired[str]


class Embedding(TypedDict):
    """The vector of one entry."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Field(description="Numbers, or FP32 in base64.")]


class EmbeddingsUsage(TypedDict):
    """Tokens of the request; 0 for models that take text."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(TypedDict):
    """A vector for each entry, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class RerankRequest(TypedDict):
    """A query, and texts to order."""

    model: NotRequired[Annotated[str, Field(description="NAME, or NAME:VERSION; left out: the only model.")]]
    query: str
    documents: list[str | dict[str, str]]
    top_n: NotRequired[Annotated[int, Field(ge=1, description="How many are answered; default: all.")]]
    return_documents: NotRequired[bool]


class RerankResult(TypedDict):
    """A text, by its index in the request."""

    index: int
    relevance_score: float
    document: NotRequired[dict[str, str]]


class RerankReply(TypedDict):
    """The texts, the best first."""

    id: str
    model: str
    usage: EmbeddingsUsage
    results: list[RerankResult]


class ClassesRequest(TypedDict):
    """Texts, or images in base64."""

    model: NotRequired[Annotated[str, Field(description="NAME, or NAME:VERSION; left out: the only model.")]]
    input: str | list[str]


class ClassifiedEntry(TypedDict):
    """The best class of an entry, and the probabilities of all in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassesReply(TypedDict):
    """A class for each entry, in order."""

    id: str
    object: Literal["list"]
    model: str
    data: list[ClassifiedEntry]


SCHEMAS = (EmbeddingsRequest, EmbeddingsReply, RerankRequest, RerankReply, ClassesRequest, ClassesReply)


router = APIRouter()

_BODY = json_body(EmbeddingsRequest, form="embeddings")
_ERRORS = documented(400, 404, 413, 415, 429, 500, 501, 503, 504)
_ANSWERS = (
    reply(
        ref(EmbeddingsReply),
        "A vector for each entry.",
        example={
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
            "model": "minilm",
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        },
    )
    | _ERRORS
)
_RANKED = reply(ref(RerankReply), "The texts, the best first.") | _ERRORS
_CLASSIFIED = reply(ref(ClassesReply), "The classes.") | _ERRORS


@router.post(
    "/v1/embeddings",
    summary="Embeddings of texts or token ids",
    description="For versions with one embedding output. An output of (rows, dim) is given unchanged; one of (rows, "
    "tokens, dim) is averaged over the tokens and made a unit vector. Text needs a tokenizer.json beside the model.",
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_BODY,
)
@router.post("/openai/v1/embeddings", include_in_schema=False)
async def create_embeddings(request: Request, deps: DepsOf) -> Response:
    limits = JsonLimits(deps.settings.json_bytes_max, deps.settings.json_values_max)
    embeddings = Embeddings(deps.caller("openai"), deps.part(Tokenizers), limits)
    async with decompressed_body(request, deps) as body:
        text = await cancel_on_disconnect(request, embeddings.answer(body))
    return Response(text, media_type="application/json")


@router.post(
    "/v1/rerank",
    summary="Order texts by how well they answer a query",
    description="Cross-encoders score each pair of query and text (sigmoid of their one number), embedding models the "
    "cosine. Bodies as Jina, Cohere and vLLM send them; `texts` in place of `documents`, as "
    "text-embeddings-inference has it, gets a list. /v2/rerank replies as Cohere's version 2 does.",
    response_class=Response,
    responses=_RANKED,
    openapi_extra=json_body(RerankRequest),
)
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(request: Request, deps: DepsOf) -> Response:
    ranking, limits = _ranking(deps)
    async with decompressed_body(request, deps) as body:
        read = await run_in_thread_if_large(len(body), read_rerank, body, limits)
        cohere = request.url.path.endswith("/v2/rerank")
        text = await cancel_on_disconnect(request, ranking.rerank(read, cohere=cohere))
    return Response(text, media_type="application/json")


@router.post(
    "/classify",
    summary="Scores of all classes for texts or images",
    description="Of versions with labels. `input` is answered as vLLM does, `inputs` as text-embeddings-inference's "
    "/predict: a list of labels and scores, the best first, for each entry. An image is given in base64.",
    response_class=Response,
    responses=_CLASSIFIED,
    openapi_extra=json_body(ClassesRequest),
)
async def classify(request: Request, deps: DepsOf) -> Response:
    ranking, limits = _ranking(deps)
    async with decompressed_body(request, deps) as body:
        read = await run_in_thread_if_large(len(body), read_classify, body, limits)
        text = await cancel_on_disconnect(request, ranking.classify(read))
    return Response(text, media_type="application/json")


def _ranking(deps: Deps) -> tuple[Ranking, JsonLimits]:
    limits = JsonLimits(deps.settings.json_bytes_max, deps.settings.json_values_max)
    caller, texts = deps.caller("openai"), deps.part(Tokenizers)
    return Ranking(caller, texts, Embeddings(caller, texts, limits), deps.catalog.snapshot), limits


@router.get("/v1/models", include_in_schema=False)
@router.get("/openai/v1/models", include_in_schema=False)
async def openai_list_models(deps: DepsOf) -> dict[str, Any]:
    return model_list(visible(deps.catalog.snapshot))


_RUN = Row(Need.INFER)  # the body names the model

ADAPTER = Adapter(
    routes=(Routes(router, Tag("OpenAI", "Embeddings, and what servers of embeddings offer beside them."), order=120),),
    access={
        ("POST", "/v1/embeddings"): _RUN,
        ("POST", "/openai/v1/embeddings"): _RUN,
        ("POST", "/v1/rerank"): _RUN,
        ("POST", "/rerank"): _RUN,
        ("POST", "/v2/rerank"): _RUN,
        ("POST", "/classify"): _RUN,
        ("GET", "/v1/models"): LIST,
        ("GET", "/openai/v1/models"): LIST,
    },
    protocols=("openai",),
    error_format=FORMAT,
    error_paths=("/v1/", "/openai/", "/rerank", "/v2/rerank", "/classify"),
    schemas=SCHEMAS,
)
