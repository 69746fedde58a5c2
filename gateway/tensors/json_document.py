"""A short JSON text -> its value, checks of a document's members, and refusals in the reference server's words. Pure.

orjson parses strict JSON. A text that it refuses for `NaN`, `Infinity` or a number outside the range of a double is
parsed again with the standard library, which accepts these, as the reference server and Python clients do. A byte order
mark, with which Windows' editors and PowerShell begin a text, is skipped.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from typing import Any, NoReturn

import orjson

from millstream.services.errors import Code, Failure, invalid

#: the standard library takes three times as long: a longer text that is not strict JSON is refused
_LENIENT_BYTES_MAX = 4 << 20
_EXCERPT_CHARACTERS_MAX = 200


def loads(text: bytes) -> Any:
    """Return the JSON value in `text`. The last value of a repeated key counts. Raises Failure: INVALID, TOO_LARGE."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if text.startswith(BOM_UTF8) and not text.startswith(2 * BOM_UTF8):
            return loads(text.removeprefix(BOM_UTF8))
        if b"NaN" in text or b"Infinity" in text or "infinity" in str(error):
            return _loads_leniently(text)
        raise unparsable(str(error)) from None


def _loads_leniently(text: bytes) -> Any:
    if len(text) > _LENIENT_BYTES_MAX:
        raise Failure(
            Code.TOO_LARGE,
            f"a JSON document of more than {_LENIENT_BYTES_MAX} bytes may hold NaN, Infinity and numbers beyond a "
            "double in long lists alone: send such tensors in binary form",
        )
    try:
        # decoded here, because json.loads would also take UTF-16 and UTF-32
        return json.loads(text.decode())
    except RecursionError:
        # The interpreter's recursion limit bounds the depth. Decoders refuse less deep nesting, with its position.
        raise unparsable("nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, an integer of thousands of digits
        raise unparsable(str(error)) from None


def unparsable(reason: str) -> Failure:
    """Return the refusal of a text that is not JSON, in the reference server's words."""
    return invalid(f"failed to parse the request JSON buffer: {excerpt(reason)}")


def excerpt(name: object) -> str:
    """Return a caller's text, cut to 200 characters, for use in a message."""
    text = name if isinstance(name, str) else repr(name)
    return text if len(text) <= _EXCERPT_CHARACTERS_MAX else text[:_EXCERPT_CHARACTERS_MAX] + "..."


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
