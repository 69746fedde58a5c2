"""json_document: a request's JSON object, checks of its members, and their refusals in the reference server's words."""

from __future__ import annotations

from typing import Any, NoReturn

from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits, parse
from millstream.gateway.tensors.strict_json import unparsable
from millstream.services.errors import invalid

_SHOWN_CHARACTERS_MAX = 200


def shown(name: object) -> str:
    """Return a caller's text for use in a message: cut to 200 characters."""
    text = name if isinstance(name, str) else repr(name)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."


def parse_json(
    text: bytes, limits: JsonLimits = DEFAULT_LIMITS, *, depth: int = -1, in_lists: bool = False
) -> dict[str, Any]:
    """Return the JSON object in `text`. The arguments are those of json_text.parse.

    Raises:
        Failure: INVALID (not JSON, or no object), TOO_LARGE.
    """
    document = parse(text, limits, depth=depth, in_lists=in_lists)
    if type(document) is not dict:
        raise unparsable("the body is not a JSON object")
    return document


def missing(key: str, where: str = "") -> NoReturn:
    """Raise Failure(INVALID): the member `key` is missing. `where`: names the input or output, as " for input 'x'"."""
    raise invalid(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'{where}")


def mistyped(key: str, wanted: str, where: str = "") -> NoReturn:
    """Raise Failure(INVALID): the member `key` has another JSON type than `wanted`."""
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
    """Return a `parameters` member, {} for null. Raises Failure(INVALID) if it is not an object."""
    if value is None:
        return {}
    if type(value) is not dict:
        mistyped("parameters", "object", where)
    return value
