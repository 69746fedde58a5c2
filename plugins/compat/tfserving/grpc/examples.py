"""The Input message of Classify and Regress -> the inputs of a version, and outputs -> their results. Pure.

Each feature of an Example is an input of the version; an Example is a row.
Source: TensorFlow Serving, Input and ClassificationResult; TensorFlow, Example.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from millstream.gateway.tensors.input_plans import InputPlans, Inputs
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.plugins.compat.tfserving.predict import read_examples, scores_of, values_of
from millstream.services.errors import invalid


def read_input(plans: InputPlans, message: Any) -> Inputs:
    """Return the inputs in an Input message. Raises Failure(INVALID)."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise invalid("Input is empty.")
    listed = getattr(message, kind)
    if not listed.examples:
        raise invalid("Input is empty.")
    document: dict[str, Any] = {"examples": [_features(example) for example in listed.examples]}
    if kind == "example_list_with_context":
        document["context"] = _features(listed.context)
    return read_examples(plans, document)


def _features(example: Any) -> dict[str, Any]:
    return {name: _feature(feature) for name, feature in example.features.feature.items()}


def _feature(feature: Any) -> Any:
    """Return the values of a feature as JSON has them; a single one without its list."""
    kind = feature.WhichOneof("kind")
    values = [] if kind is None else list(getattr(feature, kind).value)
    if kind == "bytes_list":
        values = [{"b64": base64.b64encode(value).decode("ascii")} for value in values]
    return values[0] if len(values) == 1 else values


def write_classes(outputs: Sequence[OutputTensor], labels: Sequence[str], result: Any) -> None:
    """Write the scores of each example into a ClassificationResult. Raises Failure(INVALID)."""
    scores = scores_of(outputs)
    names = [labels[at] if at < len(labels) else str(at) for at in range(scores.shape[1])]
    for row in scores.tolist():
        classes = result.classifications.add().classes
        for name, score in zip(names, row, strict=True):
            classes.add(label=name, score=score)


def write_values(outputs: Sequence[OutputTensor], result: Any) -> None:
    """Write the value of each example into a RegressionResult. Raises Failure(INVALID)."""
    for value in values_of(outputs).tolist():
        result.regressions.add(value=value)
