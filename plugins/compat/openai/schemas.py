"""schemas: JSON bodies of OpenAI's embeddings API, for the OpenAPI document.

Source: OpenAI, API reference, "Create embeddings".
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


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
