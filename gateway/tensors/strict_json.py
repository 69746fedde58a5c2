"""A short JSON text -> its value: strict JSON first, then with the tokens that Python and TensorFlow write.

orjson reads what is strict JSON. Texts that it refuses for `NaN`, `Infinity` or numbers beyond a double are read again
with the standard library, which knows these (so do the reference server and Python clients). Pure.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from millstream.services.errors import Code, Failure, invalid

#: the standard library takes three times as long: longer texts are strict JSON, or refused
_LENIENT_BYTES_MAX = 4 << 20
_SHOWN_CHARACTERS_MAX = 200


def loads(text: bytes) -> Any:
    """Return the JSON value in `text`. Of a repeated key the last one counts. Raises Failure: INVALID, TOO_LARGE."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if b"NaN" in text or b"Infinity" in text or "infinity" in str(error):
            return _loads_leniently(text)
        raise unparsable(str(error)) from None


def _loads_leniently(text: bytes) -> Any:
    if len(text) > _LENIENT_BYTES_MAX:
        raise Failure(
            Code.TOO_LARGE,
            f"a JSON document of more than {_LENIENT_BYTES_MAX} bytes may hold NaN, Infinity and numbers beyond a double "
            "in long lists alone: send such tensors in binary form",
        )
    try:
        # decoded here: json.loads would guess UTF-16 and UTF-32 from the bytes
        return json.loads(text.decode())
    except RecursionError:
        # the interpreter's own limit is the depth guard: nesting far below it is refused later, where it stands
        raise unparsable("nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, an integer of thousands of digits
        raise unparsable(str(error)) from None


def unparsable(reason: str) -> Failure:
    """The refusal of a text that is not JSON, in the reference server's words."""
    shown = reason if len(reason) <= _SHOWN_CHARACTERS_MAX else reason[:_SHOWN_CHARACTERS_MAX] + "..."
    return invalid(f"failed to parse the request JSON buffer: {shown}")
