"""Inputs by name, each checked against its plan -> the inputs of one request, in order."""

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

    tensors: list[InputTensor]  # in the signature's order, ABSENT for optional inputs that the request lacks
    rows: int

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def join(plans: InputPlans, by_name: Mapping[str, CheckedInput]) -> Inputs:
    """Return `by_name` as the inputs of one request, in the signature's order.

    Raises:
        Failure: INVALID: unknown or missing names, or numbers of rows that differ.
    """
    for name in by_name:
        plans.named(name)
    rows = 1
    first = True
    for plan in plans:
        checked = by_name.get(plan.name)
        if checked is None:
            continue
        if not first and checked.extent.rows != rows:
            raise plans.rows_differ(plan)
        rows, first = checked.extent.rows, False
    tensors = [by_name[plan.name].tensor if plan.name in by_name else None for plan in plans]
    return Inputs(plans.complete(tensors), rows)
