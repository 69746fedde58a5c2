"""Numpy arrays -> inputs of a signature, and numbers of outputs -> numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from millstream.gateway.tensors.elements import raw_from_strings
from millstream.gateway.tensors.input_plan import InputPlan
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.gateway.tensors.request_inputs import CheckedInput
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, FLOATS, NUMPY


def from_array(plan: InputPlan, array: np.ndarray[Any, Any]) -> CheckedInput:
    """Return `array` as the input of `plan`. Its numbers must be of the same kind; wider numbers are narrowed.

    Raises:
        Failure: INVALID: another shape or kind, or integers out of range.
    """
    extent = plan.fit(plan.datatype, array.shape)
    if plan.datatype == BYTES:
        raw = _raw_of_strings(plan, array)
        return CheckedInput(extent, InputTensor(extent.shape, raw, len(raw)))
    kind = array.dtype.kind
    wanted = NUMPY[plan.datatype]
    fits = kind == "b" if plan.datatype == "BOOL" else kind in ("iuf" if plan.datatype in FLOATS else "iu")
    if not fits:
        raise invalid(f"input '{plan.name}' takes {plan.datatype}, but the array holds {array.dtype}")
    if plan.datatype == "BF16":
        data = to_bf16(array)
    elif plan.datatype == "BOOL":
        data = np.ascontiguousarray(array.view(np.uint8) != 0)  # a file may hold any byte
    else:
        if plan.datatype not in FLOATS and plan.datatype != "BOOL":
            _check_range(plan, array, wanted)
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(array, wanted)
    return CheckedInput(extent, InputTensor(extent.shape, data.reshape(extent.shape), data.nbytes))


def _check_range(plan: InputPlan, array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    limits = np.iinfo(dtype)
    if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise invalid(f"input '{plan.name}': a number is out of the range of {plan.datatype}")


def _raw_of_strings(plan: InputPlan, array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.kind not in "SU":
        raise invalid(f"input '{plan.name}' takes BYTES, but the array holds {array.dtype}")
    flat = array.reshape(-1).tolist()
    try:
        return raw_from_strings([element.encode() if isinstance(element, str) else element for element in flat])
    except UnicodeEncodeError:
        raise invalid(f"input '{plan.name}': a string is not valid Unicode") from None


def to_bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the upper half of each number's FP32 form, rounded to the nearest, ties to even; NaN stays NaN."""
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(array, np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


def as_numbers(output: OutputTensor) -> np.ndarray[Any, Any]:
    """Return the numbers of an output, which is not BYTES, in its shape. BF16, which numpy lacks, becomes FP32."""
    array = output.array
    assert not isinstance(array, list)
    if output.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array).reshape(output.shape)
