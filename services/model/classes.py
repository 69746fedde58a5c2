"""How a version answers a label and a score in place of a number for each class. Pure.

scores [..., classes] ─> softmax: label and score [...], of the best class
                      ─> sigmoid: label and score [..., classes up to ANSWERED_MAX], the best class first
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, FLOATS
from millstream.services.model.signature import Signature, TensorSpec

LABEL, SCORE = "label", "score"
#: classes of a text that are answered where each may hold; beyond, the best ones: a label is text, made for each
ANSWERED_MAX = 100


class Classes(BaseModel):
    """Which output has a score for each class, in its last dimension, and how these become probabilities."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str = Field(max_length=1000, description="It is answered to requests that name it; `labels` has its file.")
    scores: Literal["softmax", "sigmoid"] = Field(
        description="softmax: one class holds, and the best is answered; sigmoid: each class may hold, and the best "
        f"{ANSWERED_MAX} are."
    )


def answered(signature: Signature, classes: Classes | None) -> Signature:
    """Return the signature that callers see: LABEL and SCORE come before the output that they are made of."""
    if classes is None:
        return signature
    outputs: list[TensorSpec] = []
    for spec in signature.outputs:
        if spec.name == classes.output:
            shape = spec.shape[:-1]
            if classes.scores == "sigmoid":
                shape = (*shape, min(spec.shape[-1], ANSWERED_MAX))
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
