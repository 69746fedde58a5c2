"""A request's JSON object, checks of its members, and their refusals in the reference server's words."""

from __future__ import annotations

from typing import Any, NoReturn

from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits, parse
from millstream.gateway.tensors.strict_json import unparsable
from millstream.services.errors import invalid

_EXCERPT_CHARACTERS_MAX = 200


def excerpt(name: object) -> str:
    """Return a caller's text, cut to 200 characters, for use in a message."""
    text = name if isinstance(name, str) else repr(name)
    return text if len(text) <= _EXCERPT_CHARACTERS_MAX else text[:_EXCERPT_CHARACTERS_MAX] + "..."


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


def raise_missing(key: str, where: str = "") -> NoReturn:
    """Raise Failure(INVALID): the member `key` is missing. `where` names the input or output: " for input 'x'"."""
    raise invalid(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'{where}")


def raise_mistyped(key: str, wanted: str, where: str = "") -> NoReturn:
    """Raise Failure(INVALID): the member `key` has another JSON type than `wanted`."""
    raise invalid(f"Unable to parse '{key}': attempt to access JSON non-{wanted} as {wanted}{where}")


def expect_unsigned(value: object, key: str, where: str = "") -> int:
    """Return `value` if it is a JSON integer from 0 to 2^64 - 1. Raises Failure(INVALID)."""
    if type(value) is not int or not 0 <= value < 2**64:
        raise_mistyped(key, "unsigned-integer", where)
    return value


def expect_boolean(value: object, key: str, where: str = "") -> bool:
    """Return `value` if it is true or false. Raises Failure(INVALID)."""
    if type(value) is not bool:
        raise_mistyped(key, "boolean", where)
    return value


def expect_parameters(value: object, where: str = "") -> dict[str, Any]:
    """Return the value of a `parameters` member, {} for null. Raises Failure(INVALID) if it is not an object."""
    if value is None:
        return {}
    if type(value) is not dict:
        raise_mistyped("parameters", "object", where)
    return value
