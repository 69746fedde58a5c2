"""Compares the outputs of a converted model with those that its source framework gave. Pure.

Integers, booleans and text agree when they are equal. Floats agree within `atol + rtol * |expected|`; NaN agrees with
NaN, and an infinity with the same infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

#: how many times the tolerance a difference is where no number says it: a wrong label, shape or kind, or NaN
_WRONG = float("inf")
_EXCERPT_CHARACTERS = 60


class Difference(NamedTuple):
    """The largest difference of one output.

    Args:
        absolute: the difference itself; 0 for outputs that are not numbers.
        tolerances: how many times the tolerance it is; above 1 the outputs disagree.
        where: its place and both values, for a message.
    """

    output: str
    absolute: float
    tolerances: float
    where: str


def compare(actual: Mapping[str, Array], expected: Mapping[str, Array], rtol: float, atol: float) -> list[Difference]:
    """Return the largest difference of each output of `expected`, in its order."""
    return [_compare_output(name, actual.get(name), array, rtol, atol) for name, array in expected.items()]


def worst(differences: list[Difference]) -> Difference:
    """Return the difference that is largest relative to its tolerance."""
    return max(differences, key=lambda difference: difference.tolerances)


def _compare_output(name: str, actual: Array | None, expected: Array, rtol: float, atol: float) -> Difference:
    if actual is None:
        return Difference(name, 0.0, _WRONG, "the converted model has no such output")
    if actual.shape != expected.shape:
        return Difference(name, 0.0, _WRONG, f"the shape is {_shape(actual)} instead of {_shape(expected)}")
    if _is_text(actual) != _is_text(expected):
        return Difference(name, 0.0, _WRONG, f"the datatype is {actual.dtype} instead of {expected.dtype}")
    if not expected.size:
        return Difference(name, 0.0, 0.0, "it is empty")
    if _is_text(expected) or (actual.dtype.kind in "biu" and expected.dtype.kind in "biu"):
        return _compare_discrete(name, actual, expected)
    return _compare_numbers(name, actual.astype(np.float64), expected.astype(np.float64), rtol, atol)


def _compare_discrete(name: str, actual: Array, expected: Array) -> Difference:
    left, right = (array.astype(str) if _is_text(array) else array for array in (actual, expected))
    wrong = np.asarray(left != right)
    if not wrong.any():
        return Difference(name, 0.0, 0.0, "")
    return Difference(name, 0.0, _WRONG, _where(actual, expected, int(np.argmax(wrong))))


def _compare_numbers(name: str, actual: Array, expected: Array, rtol: float, atol: float) -> Difference:
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        absolute = np.where(same, 0.0, np.abs(actual - expected))
        allowed = atol + rtol * np.abs(expected)
        tolerances = np.divide(absolute, allowed, out=np.where(absolute > 0, _WRONG, 0.0), where=allowed > 0)
    finite = same | (np.isfinite(actual) & np.isfinite(expected))
    tolerances = np.where(finite, tolerances, _WRONG)
    at = int(np.argmax(tolerances))
    difference = float(absolute.flat[at])
    where = _where(actual, expected, at)
    return Difference(name, difference if np.isfinite(difference) else 0.0, float(tolerances.flat[at]), where)


def _where(actual: Array, expected: Array, at: int) -> str:
    """Return both values at the position `at` of the flat arrays, and its row where there are rows."""
    row = f"in row {int(np.unravel_index(at, expected.shape)[0])} " if expected.ndim else ""
    return f"{row}it is {_value(actual, at)} instead of {_value(expected, at)}"


def _value(array: Array, at: int) -> str:
    value = array.flat[at]
    if _is_text(array):
        return repr(str(value))[:_EXCERPT_CHARACTERS]
    return f"{value:.6g}" if array.dtype.kind == "f" else str(value)


def _shape(array: Array) -> str:
    return str(list(array.shape))


def _is_text(array: Array) -> bool:
    return array.dtype.kind in "OUS"
