"""POST /v1/embeddings, as OpenAI's clients send it. GET /v1/models, which they use, too, is in tfserving."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from millstream.gateway.catalog.snapshot import visible
from millstream.gateway.http.body import cancel_on_disconnect, decompressed_body
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.deps import Deps
from millstream.gateway.http.errors import documented
from millstream.gateway.http.model_list import model_list
from millstream.gateway.http.openapi import json_body, ref, reply
from millstream.plugins.compat.openai.schemas import EmbeddingsReply, EmbeddingsRequest

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
    return await _embed(request, deps)


@router.get("/openai/v1/models", include_in_schema=False)
async def openai_list_models(deps: DepsOf) -> dict[str, Any]:
    return model_list(visible(deps.catalog.snapshot))


async def _embed(request: Request, deps: Deps) -> Response:
    async with decompressed_body(request, deps) as body:
        text = await cancel_on_disconnect(request, deps.embed(body))
    return Response(text, media_type="application/json")
