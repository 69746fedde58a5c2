"""Arrays of numbers -> JSON text. Pure."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import orjson

PIECE_ELEMENTS = 1 << 15  # numbers written by one call: 1 to 2 ms

_dumps = orjson.dumps
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def dump_numbers(array: np.ndarray[Any, Any]) -> bytes:
    """Return a C-contiguous array as JSON, nested as it is, with NaN, Infinity and -Infinity where orjson writes null.

    Large arrays are written in pieces, because orjson lets no other thread run while it writes.
    """
    if array.size <= PIECE_ELEMENTS:
        return _piece(array)
    if len(array) == 1:
        return b"[%b]" % dump_numbers(array[0])
    inner = array.size // len(array)
    step = max(1, PIECE_ELEMENTS // inner)
    write = _piece if inner <= PIECE_ELEMENTS else dump_numbers
    return b"[%b]" % b",".join([write(array[at : at + step])[1:-1] for at in range(0, len(array), step)])


def _piece(array: np.ndarray[Any, Any]) -> bytes:
    text = _dumps(array, None, _NUMPY)
    if b"null" not in text:
        return text
    flat = array.ravel()
    not_finite = flat[~np.isfinite(flat)]
    tokens = [b"NaN" if isnan(value) else b"Infinity" if value > 0 else b"-Infinity" for value in not_finite.tolist()]
    pieces = text.split(b"null")
    woven = [piece for pair in zip(pieces, tokens, strict=False) for piece in pair]
    return b"".join((*woven, pieces[-1]))
