"""The inputs that a form is trusted with: what it was judged, or proven, to be right on. Pure.

extremes: NaN, infinities, the ends of each type, … ─(the baseline accepts them; does the form agree?)─> Bounds
Bounds ─> `Guard`: does a batch lie within? A worker runs any other batch with the version's own file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from millstream.plugins.compile.candidate import DIMENSION_MAX, Bounds
from millstream.services.model.agreement import Array, as_float
from millstream.services.model.datatypes import BYTES, FLOATS, NUMPY
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs

EQUAL_ROWS = 4  # of a batch of extremes, from its first on
#: Integers that are tried where the type has them: ends of narrower types, and where FP32 ends to count.
INTEGERS = (0, -1, 1 << 24, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1, 1 << 32)
_LARGE = 1e30
#: Greatest finite number of a type, and one that is smaller than all normal ones.
_ENDS = {
    "FP64": (float(np.finfo(np.float64).max), 1e-310),
    "FP32": (float(np.finfo(np.float32).max), 1e-40),
    "FP16": (65504.0, 1e-7),
    "BF16": (3.3895313892515355e38, 1e-40),
}


class Extreme(NamedTuple):
    """A value of an input that random samples do not have. `value`: a number; `name` "": rows are equal, no more."""

    name: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"input {self.name!r} at {self.value}" if self.name else "equal rows"


def extremes(signature: Signature) -> list[Extreme]:
    """Return what is tried of a version, for each input."""
    found = [Extreme()]
    for spec in needed_inputs(signature):
        found += [Extreme(spec.name, value) for value in _values(spec.datatype)]
    return found


def _values(datatype: str) -> list[str]:
    if datatype in FLOATS:
        most, least = _ENDS[datatype]
        values = [0.0, -1.0, least, most, -most, np.nan, np.inf, -np.inf]
        return [repr(float(value)) for value in (*values, *((_LARGE, -_LARGE) if most > _LARGE else ()))]
    if datatype in {BYTES, "BOOL"}:
        return ["0", "1"] if datatype == "BOOL" else []
    ends = np.iinfo(NUMPY[datatype])
    integers = {*INTEGERS, int(ends.min), int(ends.max)}
    return [str(value) for value in sorted(integers) if ends.min <= value <= ends.max]


def extreme_rows(inputs: Mapping[str, Array], spec: TensorSpec | None, value: str, rows: int) -> dict[str, Array]:
    """Return `rows` rows of samples: the first EQUAL_ROWS are equal and have the value, one of the others in one place.

    Args:
        inputs: of a version that batches, at least `rows` rows.
        spec: of the input that has the value; None: no input has.
        value: a number, as in Extreme.
        rows: of the batch.
    """
    made = {name: array[:rows].copy() for name, array in inputs.items()}
    for array in made.values():
        array[:EQUAL_ROWS] = array[:1]
    if spec is not None:
        number = _number(spec.datatype, value)
        made[spec.name][:EQUAL_ROWS] = number
        if rows > EQUAL_ROWS:
            made[spec.name][rows // 2].reshape(-1)[:1] = number
    return made


def extreme_call(inputs: Mapping[str, Array], spec: TensorSpec | None, value: str) -> dict[str, Array]:
    """Return the call of a version that does not batch, with the value everywhere in an input."""
    made = {name: array.copy() for name, array in inputs.items()}
    if spec is not None:
        made[spec.name][...] = _number(spec.datatype, value)
    return made


def _number(datatype: str, value: str) -> Array:
    if datatype not in FLOATS:
        return np.array(int(value)).astype(NUMPY[datatype])
    if datatype == "BF16":
        with np.errstate(over="ignore"):
            return (np.array(float(value), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore", under="ignore"):
        return np.array(float(value)).astype(NUMPY[datatype])


def is_inside(bounds: Bounds, extreme: Extreme) -> bool:
    """Return whether a form with these bounds gets the value."""
    if extreme.name not in bounds:
        return True
    low, high = bounds[extreme.name]
    value = float(extreme.value)
    return low <= value <= high


def narrowed(bounds: Bounds, others: Bounds) -> Bounds:
    """Return bounds within both."""
    found = dict(bounds)
    for name, (low, high) in others.items():
        least, most = bounds.get(name, (low, high))
        found[name] = max(low, least), min(high, most)
    return found


def finite(signature: Signature) -> Bounds:
    """Return bounds with all finite numbers."""
    ends = {spec.name: _ENDS[spec.datatype][0] for spec in signature.inputs if spec.datatype in FLOATS}
    return {name: (-most, most) for name, most in ends.items()}


def sampled(signature: Signature, samples: Sequence[Mapping[str, Array]], *, integers: bool = False) -> Bounds:
    """Return bounds twice as wide as the range of samples, of floats and, if asked for, of integers."""
    found: Bounds = {}
    for spec in signature.inputs:
        arrays = [as_float(spec.datatype, one[spec.name]) for one in samples if _has_numbers(spec, one, integers)]
        numbers = np.concatenate([array[np.isfinite(array)] for array in arrays]) if arrays else np.array([])
        if numbers.size:
            low, high = float(numbers.min()), float(numbers.max())
            margin = max(abs(low), abs(high), high - low) / 2
            found[spec.name] = (low - margin, high + margin)
    return found


def _has_numbers(spec: TensorSpec, sample: Mapping[str, Array], integers: bool) -> bool:
    wanted = spec.datatype in FLOATS or (integers and spec.datatype not in {BYTES, "BOOL"})
    return wanted and spec.name in sample


class Guard:
    """Tells whether a batch lies within the bounds of a form. It costs two passes over an input with bounds."""

    def __init__(self, bounds: Bounds, signature: Signature) -> None:
        datatypes = {spec.name: spec.datatype for spec in signature.inputs}
        self._bounds = [(name, low, high, datatypes.get(name, "")) for name, (low, high) in bounds.items()]

    def admits(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether the form may run these inputs. NaN lies within no bounds."""
        for name, low, high, datatype in self._bounds:
            array = inputs.get(name)
            if array is None or not array.size:
                continue
            if datatype == "BF16":
                array = as_float(datatype, array)
            if not (low <= array.min() and array.max() <= high):
                return False
        return all(max(array.shape, default=0) <= DIMENSION_MAX for array in inputs.values())
