"""The tensors that a request of a graph holds between its steps, and the forms in which steps and conditions take them.

Inputs of the request │ outputs of a step ─> HeldTensor ─> InputTensor of the next steps │ ReadTensor of a condition
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import ABSENT, InputTensor
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.plugins.graphs.conditions import ReadTensor
from millstream.services.model.datatypes import BYTES, NUMPY, decode_elements, encode_elements

_NOTHING = np.empty(0, np.uint8)


class HeldTensor(NamedTuple):
    """A tensor that a request holds. `data`: an array, the raw form as it came, or for BYTES the elements."""

    shape: tuple[int, ...]
    data: Any
    size_bytes: int


#: in place of the output of a step that was skipped
SKIPPED = HeldTensor((), None, 0)


def held(tensor: InputTensor) -> HeldTensor:
    return SKIPPED if tensor.shape == ABSENT.shape else HeldTensor(*tensor)


def size_of(output: OutputTensor) -> int:
    array = output.array
    return sum(map(len, array)) + 8 * len(array) if isinstance(array, list) else array.nbytes


def nothing(datatype: str) -> Any:
    return [] if datatype == BYTES else _NOTHING


def step_inputs(
    plans: InputPlans, values: Sequence[HeldTensor], *, reshapes: bool = False
) -> tuple[list[InputTensor], int]:
    """Return values as the inputs of a version, and their rows. Raises Failure(INVALID): a shape does not fit."""
    tensors: list[InputTensor | None] = []
    rows, first = 1, True
    for plan, value in zip(plans, values, strict=True):
        if value is SKIPPED:
            tensors.append(None)
            continue
        shape = reshaped(value.shape, plan.shape) if reshapes else value.shape
        extent = plan.fit(plan.datatype, shape)
        if not first and extent.rows != rows:
            raise plans.rows_differ(plan)
        rows, first = extent.rows, False
        data, size_bytes = value.data, value.size_bytes
        if isinstance(data, list):
            data = encode_elements(data)
            size_bytes = len(data)
        tensors.append(InputTensor(extent.shape, data, size_bytes))
    return plans.complete(tensors), rows


def reshaped(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with or without its one row, if that is what is wanted, as Triton does between steps."""
    if len(shape) == len(wanted) - 1 and wanted[0] == -1:
        return (1, *shape)
    return shape[1:] if len(shape) == len(wanted) + 1 and shape[0] == 1 else shape


def readable(value: HeldTensor, datatype: str) -> ReadTensor:
    """Return a value as conditions read it."""
    data = value.data
    if isinstance(data, list):
        return ReadTensor(value.shape, data)
    if datatype == BYTES:
        return ReadTensor(value.shape, decode_elements(data))
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, NUMPY[datatype])
    if datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return ReadTensor(value.shape, array.reshape(-1))
