"""request_inputs: inputs by name, each checked against its plan -> the inputs of one request, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millstream.gateway.tensors.input_plan import Extent
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import InputTensor


class CheckedInput(NamedTuple):
    """One input of a request, checked against its plan."""

    extent: Extent
    tensor: InputTensor


class Inputs(NamedTuple):
    """All inputs of a request."""

    tensors: list[InputTensor]  # in the signature's order, ABSENT for optional inputs that are not given
    rows: int

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def join(plans: InputPlans, given: Mapping[str, CheckedInput]) -> Inputs:
    """Return the inputs in `given`, by name, as one request.

    Raises:
        Failure: INVALID: unknown or missing names, or numbers of rows that differ.
    """
    for name in given:
        plans.named(name)
    rows = 1
    first = True
    for plan in plans:
        checked = given.get(plan.name)
        if checked is None:
            continue
        if not first and checked.extent.rows != rows:
            raise plans.rows_differ(plan)
        rows, first = checked.extent.rows, False
    tensors = [given[plan.name].tensor if plan.name in given else None for plan in plans]
    return Inputs(plans.complete(tensors), rows)
