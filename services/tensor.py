"""Tensor specs and signatures: what a version takes and gives. Pure.

Shapes here are what a client sees: when a version batches, dimension 0 is -1 (the rows).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from services.datatypes import DATATYPES


def _known(datatype: str) -> str:
    if datatype not in DATATYPES:
        raise ValueError(f"unknown datatype {datatype!r}; known: {', '.join(sorted(DATATYPES))}")
    return datatype


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    if any(d < -1 for d in shape):
        raise ValueError(f"a dimension is -1 (variable) or at least 0, got {list(shape)}")
    return shape


class TensorSpec(BaseModel):
    """A named tensor of a signature. `shape`: -1 marks a variable dimension.

    `optional`: an input that a request may leave out. `model_shape`: what the model itself takes or gives where that is
    another shape of as many elements, without the rows when it batches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    datatype: Annotated[str, AfterValidator(_known)]
    shape: Annotated[tuple[int, ...], AfterValidator(_dims)]
    optional: bool = False
    model_shape: Annotated[tuple[int, ...], AfterValidator(_dims)] | None = None


class Signature(BaseModel):
    """The inputs and outputs of a version, in the model's order.

    `batching`: dimension 0 of every input and output is the rows, and rows do not influence each other, so
    requests may share a run. Without it each request runs alone, with exactly the shapes given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: bool
