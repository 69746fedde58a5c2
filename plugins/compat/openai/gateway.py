"""POST /v1/embeddings and GET /v1/models, as OpenAI's clients send them. Where tfserving is on, it has /v1/models."""

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
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.errors import Advice, ErrorFormat, FormattedError, documented
from millstream.gateway.http.openapi import json_body, ref, reply
from millstream.gateway.http.shared_documents import model_list
from millstream.gateway.tensors.json_text import JsonLimits
from millstream.plugins.compat.openai.embeddings import Embeddings
from millstream.plugins.prepare.gateway.tokenizers import Tokenizers
from millstream.services.access.scopes import LIST, Need, Row
from millstream.services.errors import Code, Failure

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


SCHEMAS = (EmbeddingsRequest, EmbeddingsReply)


router = APIRouter()

_BODY = json_body(EmbeddingsRequest, form="embeddings")
_ANSWERS = reply(
    ref(EmbeddingsReply),
    "A vector for each entry.",
    example={
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
        "model": "minilm",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    },
) | documented(400, 404, 413, 415, 429, 500, 501, 503, 504)


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


@router.get("/v1/models", include_in_schema=False)
@router.get("/openai/v1/models", include_in_schema=False)
async def openai_list_models(deps: DepsOf) -> dict[str, Any]:
    return model_list(visible(deps.catalog.snapshot))


_RUN = Row(Need.INFER)  # the body names the model

ADAPTER = Adapter(
    routes=(Routes(router, Tag("OpenAI", "Embeddings."), order=120),),
    access={
        ("POST", "/v1/embeddings"): _RUN,
        ("POST", "/openai/v1/embeddings"): _RUN,
        ("GET", "/v1/models"): LIST,
        ("GET", "/openai/v1/models"): LIST,
    },
    protocols=("openai",),
    error_format=FORMAT,
    error_paths=("/v1/", "/openai/"),
    schemas=SCHEMAS,
)
