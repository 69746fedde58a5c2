"""JSON bytes -> the request's document, and the checks that its members are what they should be.

orjson reads what is strict JSON. Bodies it refuses for `NaN`, `Infinity` or numbers beyond a double are read again
with the standard library, which knows these (so do the reference server and Python clients).
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import orjson

from services.errors import Failure, invalid

_SHOWN_CHARACTERS_MAX = 200


def shown(name: object) -> str:
    """`name` as it may stand in a message: a caller's text is never repeated at length."""
    text = name if isinstance(name, str) else repr(name)
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."


def parse_json(text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises Failure(INVALID). Of a repeated key the last one counts."""
    document = parse_value(text)
    if type(document) is not dict:
        raise _unparsable("the body is not a JSON object")
    return document


def parse_value(text: bytes) -> Any:
    """Return the JSON value in `text`, of any kind. Raises Failure(INVALID)."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if b"NaN" in text or b"Infinity" in text or "infinity" in str(error):
            return _parse_lenient(text)
        raise _unparsable(str(error)) from None


def _parse_lenient(text: bytes) -> Any:
    try:
        # decoded here: json.loads would guess UTF-16 and UTF-32 from the bytes
        return json.loads(text.decode())
    except RecursionError:
        # the interpreter's own limit is the depth guard: nesting far below it is refused later, where it stands
        raise _unparsable("nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, an integer of thousands of digits
        raise _unparsable(str(error)) from None


def _unparsable(reason: str) -> Failure:
    return invalid(f"failed to parse the request JSON buffer: {shown(reason)}")


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
