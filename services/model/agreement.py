"""Compares the outputs of two runs of a model: the same rows alone and in a batch, or in another order. Pure.

Discrete values (integers, booleans, text) agree when they are equal. Floats agree when another order of summation
explains their difference. Each column, that is each position of the shape without the rows, has its own tolerance, so
that a column of large values does not hide an error in a column of small values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millstream.services.model.datatypes import FLOATS

Array = np.ndarray[Any, Any]

#: largest difference of two sums of the same numbers, relative to the largest value of their column
SUMMING: dict[str, float] = {"FP16": 4e-3, "BF16": 3e-2, "FP32": 2e-5, "FP64": 1e-9}
#: the same for two runs with one shape, which sum in the same order
REPEATED: dict[str, float] = {"FP16": 1e-3, "BF16": 8e-3, "FP32": 1e-6, "FP64": 1e-12}
#: error of a sum that cancels out, in steps of the datatype relative to the largest value of the whole tensor
_STEPS = 8
_STEP: dict[str, float] = {"FP16": 2.0**-10, "BF16": 2.0**-7, "FP32": 2.0**-23, "FP64": 2.0**-52}


def as_float(datatype: str, array: Array) -> Array:
    """Return floats of any datatype as FP64. BF16 arrays contain the bits, in uint16."""
    if datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def disagreeing_rows(
    datatype: str, actual: Array, expected: Array, relative: float | None = None, scale: Array | None = None
) -> list[int]:
    """Return the positions on axis 0 at which two arrays disagree; every row of `expected` when the shapes differ.

    Args:
        datatype: of both arrays, a v2 datatype.
        actual: (rows, …).
        expected: of the same shape; the reference.
        relative: tolerance of floats relative to their column's scale; None: `SUMMING` of the datatype.
        scale: `column_scale` of more rows than these; None: the scale of `expected`.
    """
    if actual.shape != expected.shape:
        return list(range(len(expected)))
    if not expected.size:
        return []
    if datatype not in FLOATS:
        wrong = np.asarray(actual != expected, dtype=bool)
    else:
        wrong = ~_close(datatype, actual, expected, SUMMING[datatype] if relative is None else relative, scale)
    return [int(row) for row in np.flatnonzero(wrong.reshape(len(expected), -1).any(axis=1))]


def agree(datatype: str, actual: Array, expected: Array, relative: float | None = None) -> bool:
    """Return whether two arrays have the same shape and all rows (axis 0) agree. Arguments as in `disagreeing_rows`."""
    if actual.shape != expected.shape:
        return False
    if expected.ndim == 0:
        actual, expected = actual.reshape(1), expected.reshape(1)
    return not disagreeing_rows(datatype, actual, expected, relative)


def column_scale(datatype: str, array: Array) -> Array:
    """Return the largest finite magnitude of each column, shape `array.shape[1:]`; zeros unless it holds floats."""
    if datatype not in FLOATS or not len(array):
        return np.zeros(array.shape[1:])
    magnitude = np.abs(as_float(datatype, array))
    largest: Array = np.where(np.isfinite(magnitude), magnitude, 0.0).max(axis=0)
    return largest


def _close(datatype: str, actual: Array, expected: Array, relative: float, scale: Array | None) -> Array:
    left, right = as_float(datatype, actual), as_float(datatype, expected)
    scale = column_scale(datatype, expected) if scale is None else scale
    tolerance = relative * scale + _STEPS * _STEP[datatype] * float(scale.max())
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        close = (np.abs(left - right) <= tolerance) & np.isfinite(left) & np.isfinite(right)
    same: Array = close | (left == right) | (np.isnan(left) & np.isnan(right))
    return same
