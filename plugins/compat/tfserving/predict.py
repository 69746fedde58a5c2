"""Reads and writes bodies of TensorFlow Serving's REST API, of which KServe's V1 protocol is a part. Pure.

predict:            row and column form, as in millstream.gateway.tensors.rows_json
classify, regress:  {"examples": [...]} ─> {"result": [...]}
Source: TensorFlow Serving, "RESTful API"; KServe, "V1 Protocol".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from millstream.gateway.tensors.examples import Body, Target
from millstream.gateway.tensors.input_plans import CheckedInput, InputPlans, Inputs
from millstream.gateway.tensors.inputs import InputPlan
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits, parse
from millstream.gateway.tensors.named_columns import read_named
from millstream.gateway.tensors.nested_lists import row_of_lists
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.output_options import Extensions
from millstream.gateway.tensors.outputs import OutputTensor, rows_of, text_of
from millstream.gateway.tensors.rows_json import row_names
from millstream.services.errors import invalid, not_found
from millstream.services.model.datatypes import BYTES

SIGNATURE_NAME = "serving_default"


def servable_not_found(model: str, version: str | None, hint: str = "") -> Exception:
    """Return the failure for a version that does not exist, in TensorFlow Serving's words, with `hint` at its end."""
    which = f"Latest({excerpt(model)})" if version is None else f"Specific({excerpt(model)}, {excerpt(version)})"
    return not_found(f"Servable not found for request: {which}{hint}")


def read_document(text: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Return the JSON object in `text`, and check the signature that it names. Raises Failure(INVALID)."""
    document = parse(text, limits, number_lists=True)
    if type(document) is not dict:
        raise invalid("the request is a JSON object with 'instances' or 'inputs'")
    check_signature_name(document)
    return document


def check_signature_name(document: dict[str, Any]) -> None:
    name = document.get("signature_name")
    if name is not None and (type(name) is not str or name not in {"", SIGNATURE_NAME}):
        raise invalid(f"Serving signature name: \"{excerpt(name)}\" not found: there is '{SIGNATURE_NAME}'")


def read_examples(plans: InputPlans, document: dict[str, Any]) -> Inputs:
    """Return the inputs in `examples`, each `{feature: value or list}`, and in `context`. Raises Failure(INVALID)."""
    examples = document.get("examples")
    if type(examples) is not list or not examples:
        raise invalid("'examples' is a list of objects {feature: value}, and not empty")
    context = document.get("context", {})
    if type(context) is not dict:
        raise invalid("'context' is an object {feature: value}")
    merged = []
    for at, example in enumerate(examples):
        if type(example) is not dict:
            raise invalid(f"examples[{at}] is an object {{feature: value}}")
        merged.append({**context, **example})
    return read_named(plans, {name: [example[name] for example in merged] for name in row_names(merged)}, _feature)


def _feature(plan: InputPlan, column: list[Any]) -> CheckedInput:
    """Return a feature's values as rows; if the input has columns, a single value becomes a list of one."""
    if len(plan.shape) == 2:
        column = [value if type(value) in {list, NumberList} else [value] for value in column]
    return row_of_lists(plan, column)


def classify_body(target: Target) -> Body | None:
    """Return {"examples": [...]}; None for versions whose outputs are not one table of scores, (rows, classes)."""
    shape = _output_shape(target)
    return _examples_body(target) if shape is not None and len(shape) == 2 else None


def regress_body(target: Target) -> Body | None:
    """Return {"examples": [...]}; None for versions whose outputs are not one number a row."""
    shape = _output_shape(target)
    return _examples_body(target) if shape is not None and _one_a_row(shape) else None


def _output_shape(target: Target) -> tuple[int, ...] | None:
    outputs = target.signature.outputs
    usable = len(outputs) == 1 and outputs[0].datatype != BYTES and target.signature.batching
    return outputs[0].shape if usable else None


def _examples_body(target: Target) -> Body | None:
    if any(0 in sample.shape for sample in target.samples):
        return None
    return Body({"examples": [{sample.name: sample.row for sample in target.samples}]})


def write_classes(outputs: Sequence[OutputTensor], labels: Sequence[str]) -> bytes:
    """Return `result`: for each example its [label, score] pairs in the model's order.

    Without `labels` the label is the class's number. Raises Failure(INVALID) unless there is one output of numbers,
    (rows, classes).
    """
    scores_of(outputs)
    names = [orjson.dumps(labels[at] if at < len(labels) else str(at)) for at in range(outputs[0].shape[1])]
    rows = [
        b"[%b]" % b",".join([b"[%b,%b]" % pair for pair in zip(names, map(text_of, rows_of(row)), strict=True)])
        for row in rows_of(outputs[0])
    ]
    return b'{"result":[%b]}' % b",".join(rows)


def write_values(outputs: Sequence[OutputTensor]) -> bytes:
    """Return `result`: a value for each example. Raises Failure(INVALID) unless the output is one number a row."""
    values_of(outputs)
    output = outputs[0]
    return b'{"result":%b}' % text_of(output._replace(shape=(output.shape[0],)))


def of_classes(extensions: Extensions, outputs: Sequence[OutputTensor]) -> tuple[Sequence[OutputTensor], Sequence[str]]:
    """Return the outputs that classify, and their labels: of a version that answers labels, what they are made of."""
    at = extensions.classes
    return (outputs, extensions.labels[0]) if at is None else (outputs[at : at + 1], extensions.labels[at])


def scores_of(outputs: Sequence[OutputTensor]) -> np.ndarray[Any, Any]:
    """Return the output, (rows, classes), that is the scores of examples. Raises Failure(INVALID)."""
    if len(outputs) != 1 or isinstance(outputs[0].array, list) or len(outputs[0].shape) != 2:
        raise invalid("the model cannot classify: it has not one output of scores, (rows, classes); use :predict")
    return outputs[0].array


def values_of(outputs: Sequence[OutputTensor]) -> np.ndarray[Any, Any]:
    """Return the output that is a number for each example, (rows,). Raises Failure(INVALID)."""
    if len(outputs) != 1 or isinstance(outputs[0].array, list) or not _one_a_row(outputs[0].shape):
        raise invalid("the model cannot regress: it has not one output of one number a row; use :predict")
    return outputs[0].array.reshape(-1)


def _one_a_row(shape: tuple[int, ...]) -> bool:
    return bool(shape) and all(dim == 1 for dim in shape[1:])
