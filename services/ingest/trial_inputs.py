"""Generates random inputs for trial runs. Imported by the checker process only."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from millstream.services.ingest.model_io import Dim, ModelTensor
from millstream.services.ingest.trial_session import Array, Runs, TrialError
from millstream.services.model.agreement import as_float
from millstream.services.model.datatypes import BYTES, FLOATS, NUMPY

#: elements of one generated tensor; larger sizes are not tried
ELEMENTS_MAX = 1 << 26
#: sizes to try for variable dimensions, most likely first: images, audio and sequences have minimal lengths
_SIZES = (8, 16, 32, 224, 1, 2, 3, 64, 128, 256, 384, 512, 1000, 1024, 2048, 16000)
#: no further size is tried after this time
_PROBE_S_MAX = 10.0
_WORDS = ("", "a", "b", "red", "green", "Bremen", "0", "1")
_LONG_WORD = "long " * 100
_SUM = re.compile(r"\w+(?: *\+ *\w+)+", re.ASCII)
#: factor and offset of an extreme row's values: far from all other rows, but finite
_EXTREME = {"FP16": 1e3, "BF16": 1e6, "FP32": 1e6, "FP64": 1e6}


class Style(Enum):
    """Distribution of the generated floats and integers."""

    NORMAL = "normal floats, integers 0 and 1"
    UNIFORM = "floats from 0 to 1, integers 0 and 1"
    ONES = "floats from 0 to 1, integers 1"
    WIDE = "floats of large magnitude, integers up to 9"
    ZEROS = "zeros"


class Probe(NamedTuple):
    """A size of variable dimensions and a style with which the model runs; `observed`: its outputs on one row."""

    size: int
    style: Style
    observed: list[Array]


def find_probe(session: Runs, inputs: Sequence[ModelTensor]) -> Probe:
    """Return the first size of variable dimensions and style of values with which the model runs one row.

    Raises TrialError with the first error; an out-of-memory error only if there was no other.
    """
    errors: list[TrialError] = []
    start = time.monotonic()
    variable = any(not isinstance(dim, int) for tensor in inputs for dim in tensor.dims[1:])
    for size in _SIZES if variable else _SIZES[:1]:
        if max((math.prod(shape_of(tensor, 1, size)) for tensor in inputs), default=0) > ELEMENTS_MAX:
            continue
        for style in (Style.NORMAL, Style.ONES, Style.ZEROS):
            try:
                return Probe(size, style, session.run(draw(inputs, 1, size, style)))
            except TrialError as error:
                errors.append(error)
        if time.monotonic() - start > _PROBE_S_MAX:
            break
    raise min(errors, key=lambda error: error.out_of_memory, default=TrialError("its inputs are too large to try"))


def shape_of(tensor: ModelTensor, rows: int, size: int, *, keep_fixed: bool = False) -> tuple[int, ...]:
    """Return the shape for `rows` rows with variable dimensions of `size`; one row keeps a fixed first dimension.

    `keep_fixed`: so do more rows.
    """
    fixed = tuple(_size_of(dim, size) for dim in tensor.dims)
    if not fixed or ((rows == 1 or keep_fixed) and isinstance(tensor.dims[0], int)):
        return fixed
    return (rows, *fixed[1:])


def _size_of(dim: Dim, size: int) -> int:
    """Return the size of a dimension; exporters name the sum of two dimensions like "past + sequence"."""
    if isinstance(dim, int):
        return dim
    if dim is None or len(dim) > 100 or not _SUM.fullmatch(dim):
        return size
    terms = [term.strip() for term in dim.split("+")]
    return sum(min(int(term), size) if term.isdigit() else size for term in terms)


def draw(inputs: Sequence[ModelTensor], rows: int, size: int, style: Style, *, keep_fixed: bool = False) -> list[Array]:
    """Return random inputs, equal for equal arguments. Text is arrays of str; BF16 is its bits in uint16."""
    generator = np.random.default_rng([rows, size, list(Style).index(style)])
    shapes = [shape_of(tensor, rows, size, keep_fixed=keep_fixed) for tensor in inputs]
    return [_draw(tensor.datatype, shape, style, generator) for tensor, shape in zip(inputs, shapes, strict=True)]


def extreme_row(inputs: Sequence[ModelTensor], arrays: Sequence[Array]) -> list[Array]:
    """Return a row like the first of `arrays` with huge floats and long text, which must not affect other rows."""
    return [_extreme(tensor.datatype, array[:1]) for tensor, array in zip(inputs, arrays, strict=True)]


def _extreme(datatype: str, row: Array) -> Array:
    if datatype == BYTES:
        return np.full(row.shape, _LONG_WORD, dtype=object)
    if datatype not in FLOATS:  # integers may be sizes, counts or indices: huge values would be invalid
        return row.copy()
    values = as_float(datatype, row) * _EXTREME[datatype] + _EXTREME[datatype]
    return _from_float(datatype, values.astype(np.float32 if datatype == "BF16" else np.float64))


def _draw(datatype: str, shape: tuple[int, ...], style: Style, generator: np.random.Generator) -> Array:
    if datatype == BYTES:
        return generator.choice(np.array(_WORDS, dtype=object), shape)
    if style is Style.ZEROS:
        return np.zeros(shape, NUMPY[datatype])
    if datatype in FLOATS:
        return _from_float(datatype, _floats(shape, style, generator))
    if style is Style.ONES:
        return np.ones(shape, NUMPY[datatype])
    above = 10 if style is Style.WIDE and datatype != "BOOL" else 2
    return generator.integers(0, above, shape).astype(NUMPY[datatype])


def _floats(shape: tuple[int, ...], style: Style, generator: np.random.Generator) -> Array:
    if style in {Style.UNIFORM, Style.ONES}:
        return generator.random(shape, np.float32)
    return generator.standard_normal(shape, np.float32) * np.float32(30 if style is Style.WIDE else 1)


def _from_float(datatype: str, values: Array) -> Array:
    values = np.ascontiguousarray(values)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if datatype == "BF16" else values.astype(NUMPY[datatype])


def row_of(arrays: Sequence[Array], row: int) -> list[Array]:
    """Return one row of the inputs as a batch of one."""
    return [np.ascontiguousarray(array[row : row + 1]) for array in arrays]
