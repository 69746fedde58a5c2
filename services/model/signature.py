"""Tensor specs and signatures: the inputs and outputs of a version. Pure.

Shapes are those that a client sees: when a version batches, dimension 0 is -1 (the rows).
"""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from millstream.services.model.datatypes import DATATYPES


def _known(datatype: str) -> str:
    if datatype not in DATATYPES:
        raise ValueError(f"unknown datatype {datatype!r}; known: {', '.join(sorted(DATATYPES))}")
    return datatype


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    if any(d < -1 for d in shape):
        raise ValueError(f"a dimension is -1 (variable) or at least 0, got {list(shape)}")
    return shape


class TensorSpec(BaseModel):
    """A named tensor of a signature.

    Args:
        shape: -1 marks a variable dimension.
        optional: a request may leave this input out.
        on_request: this output is answered only to requests that name it.
        model_shape: the model's own shape where it differs, with the same number of elements; without the rows when
            the version batches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    datatype: Annotated[str, AfterValidator(_known)]
    shape: Annotated[tuple[int, ...], AfterValidator(_dims)]
    optional: bool = False
    on_request: bool = False
    model_shape: Annotated[tuple[int, ...], AfterValidator(_dims)] | None = None


class Signature(BaseModel):
    """The inputs and outputs of a version, in the model's order.

    Args:
        batching: dimension 0 of every input and output is the rows, and rows do not influence each other, so that
            requests may share a run. Otherwise each request runs alone, with exactly its shapes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: bool

    @model_validator(mode="after")
    def _shapes_of_one_size(self) -> Self:
        for spec in (*self.inputs, *self.outputs):
            seen = spec.shape[1:] if self.batching else spec.shape
            if spec.model_shape is None:
                continue
            variable = seen.count(-1) == spec.model_shape.count(-1)
            if not variable or _fixed(seen) != _fixed(spec.model_shape):
                raise ValueError(
                    f"{spec.name!r}: {list(seen)} and the model's {list(spec.model_shape)} differ in size: "
                    "they must have the same number of elements and of variable dimensions"
                )
        return self

    @property
    def reshaped(self) -> bool:
        """Whether the model's own shapes differ from those that a client sees."""
        return any(spec.model_shape is not None for spec in (*self.inputs, *self.outputs))


def _fixed(shape: tuple[int, ...]) -> int:
    return math.prod(dim for dim in shape if dim >= 0)


def needed_inputs(signature: Signature) -> tuple[TensorSpec, ...]:
    """Return the inputs of the smallest request: those that are not optional, or all if all are optional."""
    return tuple(spec for spec in signature.inputs if not spec.optional) or signature.inputs
