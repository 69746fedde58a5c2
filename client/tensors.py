"""Converts between arrays and raw tensors of the v2 protocol. Pure.

Source: Open Inference Protocol v2, "Tensor Data Types" and the binary tensor data extension.
"""

from __future__ import annotations

import contextlib
import math
import sys
from numbers import Integral, Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES, FLOATS, NUMPY, decode_elements, encode_elements

Array = NDArray[Any]
#: size of variable dimensions other than the rows in random inputs
VARIABLE_SIZE = 16
_EXCERPT_CHARACTERS = 40  # of a value in a message


def encode(array: Array, datatype: str) -> bytes:
    """Return the raw form of an array as `datatype`. Raises Failure(INVALID) for values that it cannot represent."""
    if datatype == BYTES:
        return encode_elements(_text(at, element) for at, element in enumerate(array.ravel().tolist()))
    array = numbers(array, datatype)
    if datatype == "BF16":
        return _bf16(_converted(array, np.dtype("<f4"), datatype)).tobytes()
    dtype = NUMPY[datatype]
    if dtype.kind in "biu" and array.dtype.kind == "f" and not np.all(array == np.trunc(array)):
        if np.any(np.isnan(array)):
            raise _missing(int(np.argmax(np.isnan(array))), datatype)
        raise invalid(f"values with fractions cannot be sent as {datatype}")
    if dtype.kind in "biu" and array.size and not _fits(array, dtype):
        raise invalid(f"values from {array.min()} to {array.max()} do not fit into {datatype}")
    return _converted(array, dtype, datatype).tobytes()


def numbers(array: Array, datatype: str) -> Array:
    """Return an array as numbers, None and pandas.NA as NaN. Raises Failure(INVALID) for text, dates, other objects."""
    kind = array.dtype.kind
    if kind in "biuf":
        return array
    if kind == "V" and array.dtype.names is None and np.can_cast(array.dtype, np.float32):
        return array.astype(np.float32)  # bfloat16 and its like, which numpy itself does not have
    if kind == "O":
        values = [_number(at, element, datatype) for at, element in enumerate(array.ravel().tolist())]
        exact = datatype not in FLOATS and all(isinstance(value, int) for value in values)
        try:
            return np.array(values, None if exact else np.float64).reshape(array.shape)
        except OverflowError:
            raise invalid(f"a value is beyond the range of {datatype}") from None
    what = {"M": "dates", "m": "durations", "U": "text", "S": "text"}.get(kind, f"values of type {array.dtype}")
    example = f" (such as {_excerpt(array.flat[0])})" if array.size else ""
    raise invalid(f"{what}{example} cannot be sent as {datatype}: the model takes numbers here")


def _number(at: int, element: object, datatype: str) -> int | float:
    element = element.item() if isinstance(element, np.generic) else element
    if isinstance(element, Integral):
        return int(element)
    if is_missing(element):
        if datatype not in FLOATS:
            raise _missing(at, datatype)
        return math.nan
    if isinstance(element, Number):
        with contextlib.suppress(OverflowError, TypeError):  # TypeError: of a complex number
            return float(element)  # type: ignore[arg-type]
    raise invalid(f"{_excerpt(element)} cannot be sent as {datatype}: value {at} is no number")


def _text(at: int, element: object) -> bytes:
    """Return the bytes of an element of text."""
    if isinstance(element, bytes):
        return element
    if isinstance(element, str):
        try:
            return element.encode()
        except UnicodeEncodeError:
            raise invalid(f"value {at} has half of a surrogate pair, which is no text: {_excerpt(element)}") from None
    if is_missing(element):
        raise _missing(at, "text")
    kind = type(element).__name__
    raise invalid(f"value {at} is no text but {_excerpt(element)} ({kind}): the model takes text here, use str()")


def is_missing(element: object) -> bool:
    """Whether an element says that there is no value: None, NaN, or pandas' NA and NaT."""
    pandas = sys.modules.get("pandas")  # a caller with such an element has imported it
    if element is None or (pandas is not None and (element is pandas.NA or element is pandas.NaT)):
        return True
    return isinstance(element, float) and math.isnan(element)


def _missing(at: int, datatype: str) -> Failure:
    return invalid(f"value {at} is missing (None or NaN), which {datatype} has no form for: fill it before the call")


def _excerpt(value: object) -> str:
    text = " ".join(repr(value.item() if isinstance(value, np.generic) else value).split())
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}…"


def _converted(array: Array, dtype: np.dtype[Any], datatype: str) -> Array:
    """Return the array as `dtype`. Raises Failure(INVALID) for a finite value that would become an infinity."""
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(array, dtype=dtype)
    if dtype.kind == "f" and np.any(np.isinf(converted) & ~np.isinf(array)):
        raise invalid(f"values from {array.min()} to {array.max()} do not fit into {datatype}")
    return converted


def _fits(array: Array, dtype: np.dtype[Any]) -> bool:
    lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(lowest <= array.min() and array.max() <= highest)


def _bf16(array: Array) -> Array:
    bits = array.view("<u4")
    # Round to nearest, ties to even, by what the cut-off half carries over; NaN keeps its quiet bit.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype("<u4")) >> 16
    return np.where(np.isnan(bits.view("<f4")), (bits >> 16) | 0x40, rounded).astype("<u2")


def decode(raw: bytes | bytearray | memoryview, datatype: str, shape: list[int]) -> Array:
    """Return an array from its raw form; BF16 becomes float32, BYTES an array of bytes objects."""
    if datatype == BYTES:
        elements = decode_elements(raw)
        if len(elements) != math.prod(shape):
            raise ValueError(f"{len(elements)} elements do not have the shape {shape}")
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(shape)
    array = np.frombuffer(raw, dtype=NUMPY[datatype])
    if datatype == "BF16":
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(shape)


def from_data(data: Any, datatype: str, shape: list[int]) -> Array:
    """Return an array from the `data` of a JSON tensor, flat or nested."""
    dtype: Any = object if datatype == BYTES else np.float32 if datatype == "BF16" else NUMPY[datatype]
    return np.asarray(data, dtype=dtype).reshape(shape)


def fit(array: Array, shape: list[int], name: str) -> Array:
    """Return the array in a shape that the input accepts. Raises Failure(INVALID).

    A single row may omit the first dimension, a column of values the second one of [-1, 1]. A flat list for [-1, -1]
    could be either, and is refused.
    """
    given = array
    if array.ndim == 0 and all(size in {-1, 1} for size in shape):
        array = array.reshape([1] * len(shape))
    elif array.ndim == 1 and array.size == 0 and all(size >= 0 for size in shape[1:]):
        array = array.reshape([0, *shape[1:]])  # no rows
    elif array.ndim == 1 and len(shape) == 2 and shape[1] == 1:
        array = array[:, np.newaxis]
    elif array.ndim == 1 and shape == [-1, -1]:
        raise invalid(
            f"input '{name}' takes {shape} (-1: any size), and a flat list of {array.size} values could be one row or "
            "one column: write [[1, 2, 3]] for a row, [[1], [2], [3]] for rows of one value"
        )
    elif array.ndim == len(shape) - 1:
        array = array[np.newaxis]
    fits = array.ndim == len(shape) and all(
        expected in {-1, actual} for expected, actual in zip(shape, array.shape, strict=True)
    )
    if not fits:
        has = f"has shape {list(given.shape)}" if given.ndim else "is a single value"
        raise invalid(f"input '{name}' {has}, but the model expects {shape} (-1: any size)")
    return array


def random_input(datatype: str, shape: list[int], rows: int, random: np.random.Generator) -> Array:
    """Return an input of `rows` rows of random values; integers are 0 or 1, which are valid indices, too."""
    sizes = [VARIABLE_SIZE if size < 0 else size for size in shape]
    if shape and shape[0] < 0:
        sizes[0] = rows
    if datatype == BYTES:
        return np.full(sizes, b"millstream", dtype=object)
    if datatype in {"FP16", "BF16", "FP32", "FP64"}:
        return random.random(sizes, dtype=np.float32)
    return random.integers(0, 2, sizes)
