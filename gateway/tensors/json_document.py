"""The checks that the members of a request's document are what they should be."""

from __future__ import annotations

from typing import Any, NoReturn

from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits, parse
from millstream.gateway.tensors.strict_json import unparsable
from millstream.services.errors import invalid

_SHOWN_CHARACTERS_MAX = 200


def shown(name: object) -> str:
    """`name` as it may stand in a message: a caller's text is never repeated at length."""
    text = name if isinstance(name, str) else repr(name)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."


def parse_json(
    text: bytes, limits: JsonLimits = DEFAULT_LIMITS, *, depth: int = -1, in_lists: bool = False
) -> dict[str, Any]:
    """Return the JSON object in `text`, as millstream.gateway.tensors.json_text.parse does. Raises Failure(INVALID, TOO_LARGE)."""
    document = parse(text, limits, depth=depth, in_lists=in_lists)
    if type(document) is not dict:
        raise unparsable("the body is not a JSON object")
    return document


def missing(key: str, where: str = "") -> NoReturn:
    """Refuse: the member `key` is not there. `where`: which input or output, if any."""
    raise invalid(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'{where}")


def mistyped(key: str, wanted: str, where: str = "") -> NoReturn:
    """Refuse: the member `key` has another JSON type than `wanted`, in the reference's words."""
    raise invalid(f"Unable to parse '{key}': attempt to access JSON non-{wanted} as {wanted}{where}")


def whole(value: object, key: str, where: str = "") -> int:
    """Return `value` if it is a JSON integer from 0 to 2^64 - 1. Raises Failure(INVALID)."""
    if type(value) is not int or not 0 <= value < 2**64:
        mistyped(key, "unsigned-integer", where)
    return value


def flag(value: object, key: str, where: str = "") -> bool:
    """Return `value` if it is true or false. Raises Failure(INVALID)."""
    if type(value) is not bool:
        mistyped(key, "boolean", where)
    return value


def members(value: object, where: str = "") -> dict[str, Any]:
    """Return a `parameters` member: {} if it is null. Raises Failure(INVALID) if it is not an object."""
    if value is None:
        return {}
    if type(value) is not dict:
        mistyped("parameters", "object", where)
    return value
