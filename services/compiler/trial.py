"""Random inputs for trial runs, and when two outputs count as equal. Imported by the checker process only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from services.compiler.ports import Port
from services.compiler.session import Array, Session, TrialError
from services.datatypes import BYTES, NUMPY

ELEMENTS_MAX = 1 << 26
#: sizes for variable dimensions, most likely first: images, audio and sequences have minimal lengths
_SIZES = (8, 16, 32, 224, 1, 2, 3, 64, 128, 256)
_WORDS = ("", "a", "b", "red", "green", "Bremen", "0", "1")
_FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})
#: how far sums in another order may be apart, relative to the largest value of the tensor
_TOLERANCE = {"FP16": 1e-2, "BF16": 4e-2, "FP32": 1e-4, "FP64": 1e-8}


class Style(Enum):
    """What random values look like: floats (low, high, normal?) and the largest integer."""

    NORMAL = "normal floats, integers 0 and 1"
    UNIFORM = "floats from 0 to 1, integers 0 and 1"
    ONES = "floats from 0 to 1, integers 1"
    WIDE = "floats of large magnitude, integers up to 9"


class Probe(NamedTuple):
    """A way to make inputs that the model runs on; `observed`: its outputs on one row."""

    size: int
    style: Style
    observed: list[Array]


def find_probe(session: Session, inputs: Sequence[Port]) -> Probe:
    """The first size of variable dimensions, and style of values, that run. Raises TrialError with the last reason."""
    error = TrialError("its inputs are too large to try")
    variable = any(not isinstance(dim, int) for port in inputs for dim in port.dims[1:])
    for size in _SIZES if variable else _SIZES[:1]:
        if max((math.prod(shape_of(port, 1, size)) for port in inputs), default=0) > ELEMENTS_MAX:
            continue
        for style in (Style.NORMAL, Style.ONES):
            try:
                return Probe(size, style, session.run(draw(inputs, 1, size, style)))
            except TrialError as failed:
                error = failed
    raise error


def shape_of(port: Port, rows: int, size: int) -> tuple[int, ...]:
    """The port's shape with `rows` rows and variable dimensions of `size`; a fixed first dimension stays for one row."""
    fixed = tuple(dim if isinstance(dim, int) else size for dim in port.dims)
    if not fixed or (rows == 1 and isinstance(port.dims[0], int)):
        return fixed
    return (rows, *fixed[1:])


def draw(inputs: Sequence[Port], rows: int, size: int, style: Style) -> list[Array]:
    """Random inputs; the same for the same arguments. Text is arrays of str, BF16 its bits in uint16."""
    generator = np.random.default_rng([rows, size, list(Style).index(style)])
    return [_draw(port.datatype, shape_of(port, rows, size), style, generator) for port in inputs]


def _draw(datatype: str, shape: tuple[int, ...], style: Style, generator: np.random.Generator) -> Array:
    if datatype == BYTES:
        return generator.choice(np.array(_WORDS, dtype=object), shape)
    if datatype in _FLOATS:
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


def _to_float(datatype: str, array: Array) -> Array:
    return (array.astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else array.astype(np.float64)


def rows_of(arrays: Sequence[Array], rows: int) -> Iterator[list[Array]]:
    """Each row of the inputs, alone."""
    for row in range(rows):
        yield [np.ascontiguousarray(array[row : row + 1]) for array in arrays]


def equal(datatype: str, actual: Array, expected: Array) -> bool:
    """Same shape and same values; floats within what another order of summing explains, NaN equal to NaN."""
    if actual.shape != expected.shape:
        return False
    if datatype not in _FLOATS:
        return bool(np.array_equal(actual, expected))
    left, right = _to_float(datatype, actual), _to_float(datatype, expected)
    finite = np.abs(right[np.isfinite(right)])
    tolerance = _TOLERANCE[datatype]
    scale = float(finite.max()) if finite.size else 0.0
    return bool(np.allclose(left, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


def says_something(datatype: str, array: Array) -> bool:
    """Whether equality with this output means anything: not when it is empty or all NaN."""
    if datatype not in _FLOATS:
        return array.size > 0
    return not bool(np.isnan(_to_float(datatype, array)).all())
