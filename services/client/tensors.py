"""Converts between arrays and raw tensors of the v2 protocol. Pure.

Source: Open Inference Protocol v2, "Tensor Data Types" and the binary tensor data extension.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.services.errors import invalid
from millstream.services.model.bytes_tensor import decode_elements, encode_elements
from millstream.services.model.datatypes import BYTES, NUMPY

Array = NDArray[Any]
#: size of variable dimensions other than the rows in random inputs
VARIABLE_SIZE = 16


def encode(array: Array, datatype: str) -> bytes:
    """Return the raw form of an array as `datatype`. Raises Failure(INVALID) for values that it cannot represent."""
    if datatype == BYTES:
        return encode_elements(e if isinstance(e, bytes) else str(e).encode() for e in array.ravel().tolist())
    if array.dtype.kind not in "biuf":
        raise invalid(f"values of type {array.dtype} cannot be sent as {datatype}")
    if datatype == "BF16":
        return _bf16(_converted(array, np.dtype("<f4"), datatype)).tobytes()
    dtype = NUMPY[datatype]
    if dtype.kind in "biu" and array.dtype.kind == "f" and not np.all(array == np.trunc(array)):
        raise invalid(f"values with fractions cannot be sent as {datatype}")
    if dtype.kind in "biu" and array.size and not _fits(array, dtype):
        raise invalid(f"values from {array.min()} to {array.max()} do not fit into {datatype}")
    return _converted(array, dtype, datatype).tobytes()


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
    """Return the array in a shape that the input accepts; adds a missing first dimension. Raises Failure(INVALID)."""
    if array.ndim == len(shape) - 1:
        array = array[np.newaxis]
    fits = array.ndim == len(shape) and all(
        expected in {-1, actual} for expected, actual in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise invalid(f"input '{name}' has shape {list(array.shape)}, but the model expects {shape} (-1: any size)")
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
