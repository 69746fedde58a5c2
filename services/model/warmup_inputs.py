"""Generates the inputs of warm-up runs: from a signature, or as config.warmup describes them.

Workers and the model check use the same inputs, so a model that cannot survive its warm-up is rejected at upload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, ITEM_BYTES, NUMPY, decode_elements
from millstream.services.model.manifest import ModelConfig, Warmup, WarmupInput
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs
from millstream.services.model.version_files import is_readable_inside, read_inside

WARMUP_BYTES_MAX = 1 << 28  # of one input of a warm-up request


def check_warmups(config: ModelConfig, signature: Signature, folder: Path) -> list[str]:
    """Return the files that warm-up requests read, as paths below the version's `folder`.

    Raises Failure(INVALID) for a request that could never succeed.
    """
    files: list[str] = []
    for warmup in config.warmup:
        where = f"config.warmup {warmup.name[:80]!r}"
        if signature.batching and not 1 <= warmup.rows <= config.rows_max:
            raise invalid(f"{where}: rows must be 1 to rows_max, which is {config.rows_max}, not {warmup.rows}")
        specs = {spec.name: spec for spec in signature.inputs}
        for spec in needed_inputs(signature):
            if spec.name not in warmup.inputs:
                raise invalid(f"{where}: input {spec.name!r} is missing")
        for name, entry in warmup.inputs.items():
            if name not in specs:
                raise invalid(f"{where}: the model has no input {name[:80]!r}; it has {', '.join(specs)}")
            why = _defect(entry, specs[name], warmup, signature.batching)
            if why is None and entry.file is not None:
                files.append(entry.file)
                inside = is_readable_inside(folder, entry.file, WARMUP_BYTES_MAX)
                why = None if inside else f"there is no plain file {entry.file[:200]!r}"
            if why is not None:
                raise invalid(f"{where}: input {name!r}: {why}")
    return files


def _defect(entry: WarmupInput, spec: TensorSpec, warmup: Warmup, batching: bool) -> str | None:
    dims = spec.shape[1:] if batching else spec.shape
    if entry.datatype != spec.datatype:
        return f"datatype {entry.datatype[:20]!r} in place of {spec.datatype}"
    if len(entry.shape) != len(dims) or any(want not in {-1, got} for want, got in zip(dims, entry.shape, strict=True)):
        return f"shape {list(entry.shape)} does not fit {list(dims)}"
    item = 8 if entry.datatype == BYTES else ITEM_BYTES[entry.datatype]
    size = math.prod(entry.shape) * (warmup.rows if batching else 1) * item
    return f"{size} bytes are more than the {WARMUP_BYTES_MAX} allowed" if size > WARMUP_BYTES_MAX else None


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
