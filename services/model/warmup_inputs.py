"""Generates the inputs of warm-up runs: from a signature, or as config.warmup describes them.

Workers and the model check use the same inputs, so a model that cannot survive its warm-up is rejected at upload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from millstream.services.model.bytes_tensor import decode_elements
from millstream.services.model.datatypes import BYTES, ITEM_BYTES, NUMPY
from millstream.services.model.manifest import Warmup, WarmupInput
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs
from millstream.services.model.version_files import read_inside
from millstream.services.model.warmup_check import WARMUP_BYTES_MAX

Array = np.ndarray[Any, Any]

#: bytes of the inputs of one run; runs with larger inputs are not measured
INPUT_BYTES_MAX = 1 << 28
#: sizes that are tried for a variable dimension other than the rows, in this order
VARIABLE_SIZES = (1, 2, 8, 16, 32, 64, 128, 224, 256)
#: values that are tried for every element: 0 is a valid index everywhere, 1 a valid length or divisor
FILLS: tuple[Literal[0, 1], ...] = (0, 1)
_SEED = 1
_REFERENCE_BYTES = 8


def has_variable_dims(signature: Signature) -> bool:
    """Return whether a dimension other than the rows is variable."""
    fixed_from = 1 if signature.batching else 0
    return any(-1 in spec.shape[fixed_from:] for spec in signature.inputs)


def make_inputs(signature: Signature, rows: int, size: int = 1, fill: int = 0) -> dict[str, Array]:
    """Return inputs that fit the signature, by name, without optional inputs.

    Args:
        signature: of the version.
        rows: dimension 0 if the version batches.
        size: every other variable dimension.
        fill: every element.
    """
    return {spec.name: _filled(spec, signature.batching, rows, size, fill) for spec in needed_inputs(signature)}


def input_bytes(signature: Signature, rows: int, size: int = 1) -> int:
    """Return the size in bytes of what `make_inputs` would return; of text only the references are counted."""
    return sum(
        math.prod(_shape(spec, signature.batching, rows, size)) * ITEM_BYTES.get(spec.datatype, _REFERENCE_BYTES)
        for spec in needed_inputs(signature)
    )


def run_sizes(signature: Signature, rows_max: int) -> Iterator[int]:
    """Yield the row counts of the warm-up runs: 1, 2, 4, … and `rows_max`; only 1 if the version does not batch."""
    rows = 1
    while signature.batching and rows < rows_max:
        yield rows
        rows *= 2
    yield rows_max if signature.batching else 1


def requested_inputs(warmup: Warmup, signature: Signature, folder: Path) -> dict[str, Array]:
    """Return the inputs of one request of config.warmup, by name.

    Args:
        warmup: the request.
        signature: of the version.
        folder: of the version, for inputs that are read from files.

    Raises:
        Failure: INVALID for a file that cannot be read.
        ValueError: the bytes of a file do not fit the shape.
    """
    rows = requested_rows(warmup, signature)
    return {name: _requested_array(entry, rows, folder) for name, entry in warmup.inputs.items()}


def requested_rows(warmup: Warmup, signature: Signature) -> int:
    """Return the rows of a request of config.warmup; 0 if the version does not batch."""
    return max(1, warmup.rows) if signature.batching else 0


def _filled(spec: TensorSpec, batching: bool, rows: int, size: int, fill: int) -> Array:
    shape = _shape(spec, batching, rows, size)
    if spec.datatype == BYTES:
        return np.full(shape, str(fill).encode(), dtype=object)
    if spec.datatype == "BF16":
        # the bits of 0.0 and 1.0
        return np.full(shape, 0x3F80 * fill, dtype=np.uint16)
    return np.full(shape, fill, dtype=NUMPY[spec.datatype])


def _shape(spec: TensorSpec, batching: bool, rows: int, size: int) -> list[int]:
    shape = [size if dim == -1 else dim for dim in spec.shape]
    if batching:
        shape[0] = rows
    return shape


def _requested_array(entry: WarmupInput, rows: int, folder: Path) -> Array:
    """Return `rows` equal or random rows. If `rows` is 0, `entry.shape` is the whole shape.

    A file contains one row, or all rows.
    """
    shape = (rows, *entry.shape) if rows else entry.shape
    size = int(np.prod(shape))
    if entry.fill == "file":
        return _from_file(entry, rows, folder).reshape(shape)
    random = np.random.default_rng(_SEED)
    if entry.datatype == BYTES:
        texts = [b"" if entry.fill == "zero" else str(number).encode() for number in random.integers(0, 100, size)]
        array = np.empty(size, dtype=object)
        array[:] = texts
        return array.reshape(shape)
    dtype = np.dtype(NUMPY[entry.datatype])
    if entry.fill == "zero":
        return np.zeros(shape, dtype)
    if dtype.kind == "f":
        return random.random(shape).astype(dtype)
    if entry.datatype == "BF16":  # the upper halves of float32 numbers
        return (random.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return random.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)


def _from_file(entry: WarmupInput, rows: int, folder: Path) -> Array:
    """Return the rows in the file of `entry`, as a flat array."""
    assert entry.file is not None  # WarmupInput validates this
    raw = read_inside(folder, entry.file, WARMUP_BYTES_MAX, "warm-up file")
    if entry.datatype == BYTES:
        elements = decode_elements(memoryview(raw))
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
    else:
        array = np.frombuffer(raw, NUMPY[entry.datatype])
    one = int(np.prod(entry.shape))
    return np.tile(array, rows) if rows and array.size == one else array
