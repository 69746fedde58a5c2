"""Reads an embeddings request: JSON -> texts or token ids, within limits. Pure.

Source: OpenAI, API reference, "Create embeddings", with its limits on entries and tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits, parse
from millstream.plugins.prepare.gateway.text_plans import check_tokens
from millstream.services.errors import invalid

ENTRIES_MAX = 2048
INPUT = "input"  # the member with the entries


class EmbeddingRequest(NamedTuple):
    """An embeddings request. `version` None: `model` names no version. `dimensions` 0: all of the model's."""

    model: str
    version: str | None
    entries: list[str] | list[list[int]]  # texts, or token ids
    base64: bool
    dimensions: int


def read(body: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> EmbeddingRequest:
    """Return the request in `body`. Raises Failure: INVALID, with the name of the member; TOO_LARGE."""
    document = parse(body, limits)
    if type(document) is not dict:
        raise invalid("the body is not a JSON object")
    model = document.get("model")
    if type(model) is not str or not model:
        raise invalid("you must provide a model: 'model' is a string")
    name, _, version = model.partition(":")
    form = document.get("encoding_format", "float")
    if form is not None and (type(form) is not str or form not in {"float", "base64"}):
        raise invalid("'encoding_format' is 'float' or 'base64'")
    dimensions = document.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise invalid("'dimensions' is a whole number, at least 1")
    user = document.get("user")
    if user is not None and type(user) is not str:
        raise invalid("'user' is a string")
    return EmbeddingRequest(name, version or None, _entries(document.get("input")), form == "base64", dimensions or 0)


def _entries(value: Any) -> list[str] | list[list[int]]:
    if type(value) is str:
        value = [value]
    if type(value) is not list or not value:
        raise invalid("'input' is a string, a list of strings, a list of token ids, or a list of such; not empty")
    if all(type(one) is int for one in value):
        value = [value]
    if all(type(one) is dict for one in value):
        value = [_member(at, one) for at, one in enumerate(value)]
    if len(value) > ENTRIES_MAX:
        raise invalid(f"'input' has {len(value)} entries: at most {ENTRIES_MAX}")
    kinds = set(map(type, value))
    if kinds == {str}:
        _check_texts(value)
    elif kinds == {list}:
        _check_ids(value)
    else:
        raise invalid("'input' holds strings alone, or lists of token ids alone")
    return list(value)


def _member(at: int, entry: dict[str, Any]) -> Any:
    """Return the text or image of an entry that is an object, as Jina's clients send it. Raises Failure(INVALID)."""
    kind = next(iter(entry), None)
    if len(entry) != 1 or kind not in {"text", "image"} or type(entry[kind]) is not str:
        raise invalid(
            f"'input[{at}]' is an object: it has one member, 'text' or 'image' (in base64), which is a string"
        )
    return entry[kind]


def _check_texts(texts: list[str]) -> None:
    for at, text in enumerate(texts):
        if not text:
            raise invalid(f"'input[{at}]' is an empty string")


def _check_ids(entries: list[list[Any]]) -> None:
    for at, ids in enumerate(entries):
        if not ids or not all(type(one) is int and one >= 0 for one in ids):
            raise invalid(f"'input[{at}]' is a list of token ids: whole numbers, at least one")
    check_tokens(INPUT, [len(ids) for ids in entries])
