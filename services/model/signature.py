"""Tensor specs and signatures: inputs and outputs of a version, as its model has them and as callers see them. Pure.

Shapes are those that a client sees: when a version batches, dimension 0 is -1 (the rows).
A version may answer a label and a score in place of a number for each class:
scores [..., classes] ─> softmax: label and score [...], of the best class
                      ─> sigmoid: label and score [..., classes up to ANSWERED_MAX], the best class first
                      ─> with top: label and score [..., top], the best class first
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, DATATYPES, FLOATS

LABEL, SCORE = "label", "score"
#: classes of a text that are answered where each may hold; beyond, the best ones: a label is text, made for each
ANSWERED_MAX = 100


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
        document: each element is a document of JSON, which protocols of JSON take and show as what it is, not as text.
        model_shape: the model's own shape where it differs, with the same number of elements; without the rows when
            the version batches.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    datatype: Annotated[str, AfterValidator(_known)]
    shape: Annotated[tuple[int, ...], AfterValidator(_dims)]
    optional: bool = False
    on_request: bool = False
    document: bool = False
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


class Classes(BaseModel):
    """Which output has a score for each class, in its last dimension, and how these become probabilities."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str = Field(max_length=1000, description="It is answered to requests that name it; `labels` has its file.")
    scores: Literal["softmax", "sigmoid"] = Field(
        description="softmax: one class holds, and the best is answered; sigmoid: each class may hold, and the best "
        f"{ANSWERED_MAX} are."
    )
    top: int | None = Field(
        None, ge=1, le=ANSWERED_MAX, description="How many classes are answered, the best first, whichever `scores` is."
    )

    @property
    def answered(self) -> int | None:
        """How many classes are answered at most; None: the best one, without a dimension for it."""
        return self.top if self.top is not None or self.scores == "softmax" else ANSWERED_MAX


def answered(signature: Signature, classes: Classes | None) -> Signature:
    """Return the signature that callers see: LABEL and SCORE come before the output that they are made of."""
    if classes is None:
        return signature
    outputs: list[TensorSpec] = []
    for spec in signature.outputs:
        if spec.name == classes.output:
            shape = spec.shape[:-1]
            if classes.answered is not None:
                shape = (*shape, min(spec.shape[-1], classes.answered))
            outputs.append(TensorSpec(name=LABEL, datatype=BYTES, shape=shape))
            outputs.append(TensorSpec(name=SCORE, datatype="FP32", shape=shape))
            spec = spec.model_copy(update={"on_request": True})
        outputs.append(spec)
    return signature.model_copy(update={"outputs": tuple(outputs)})


def check_classes(classes: Classes, signature: Signature, labels: tuple[str, ...] | None) -> None:
    """Raise Failure(INVALID) if the model's outputs or the label file of the output do not fit. None: there is none."""
    spec = next((spec for spec in signature.outputs if spec.name == classes.output), None)
    if spec is None:
        raise invalid(f"config.classes: the model has no output {classes.output[:80]!r}")
    if labels is None:
        raise invalid(f"config.classes: config.labels names no file for {spec.name[:80]!r}")
    if spec.datatype not in FLOATS or len(spec.shape) <= signature.batching or spec.shape[-1] != len(labels):
        raise invalid(
            f"config.classes: {spec.name[:80]!r} is {spec.datatype} {list(spec.shape)}, and there are {len(labels)} "
            "labels: it has to have a floating-point number for each"
        )
    if taken := {LABEL, SCORE} & {spec.name for spec in signature.outputs}:
        raise invalid(f"config.classes: the model has an output {min(taken)!r} of its own")
