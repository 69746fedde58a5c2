"""Bodies of TensorFlow Serving's REST API, which KServe's V1 protocol is a part of: request -> inputs, outputs -> reply.

row form:    {"instances": [...]} ─> {"predictions": [...]}      each instance is one index of dimension 0
column form: {"inputs": ...}      ─> {"outputs": ...}            whole tensors
Source: TensorFlow Serving, "RESTful API"; KServe, "V1 Protocol".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.json_document import shown
from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits, parse
from millstream.gateway.tensors.nested_json import rows_of, text_of
from millstream.gateway.tensors.nested_lists import from_lists, is_b64, row_of_lists
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.gateway.tensors.request_inputs import CheckedInput, Inputs, join
from millstream.services.errors import invalid, not_found
from millstream.services.model.signature import Signature

SIGNATURE_NAME = "serving_default"

_BYTES_SUFFIX = "_bytes"


def unknown(model: str, version: str | None) -> Exception:
    """The words that clients of TensorFlow Serving know."""
    which = f"Latest({shown(model)})" if version is None else f"Specific({shown(model)}, {shown(version)})"
    return not_found(f"Servable not found for request: {which}")


#: a document, its 'instances', one of them, an input of it: where long lists of numbers may be
TENSOR_DEPTH = 3


def read_document(text: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> dict[str, Any]:
    """The JSON object in `text`, whose signature is the one there is. Raises Failure(INVALID)."""
    document = parse(text, limits, depth=TENSOR_DEPTH, in_lists=True)
    if type(document) is not dict:
        raise invalid("the request is a JSON object with 'instances' or 'inputs'")
    check_signature_name(document)
    return document


def check_signature_name(document: dict[str, Any]) -> None:
    name = document.get("signature_name")
    if name is not None and (type(name) is not str or name not in {"", SIGNATURE_NAME}):
        raise invalid(f"Serving signature name: \"{shown(name)}\" not found: there is '{SIGNATURE_NAME}'")


def read_predict(plans: InputPlans, document: dict[str, Any]) -> tuple[Inputs, bool]:
    """The inputs, and whether they came in row form. Raises Failure(INVALID)."""
    if ("instances" in document) == ("inputs" in document):
        raise invalid("give either 'instances' (row form) or 'inputs' (column form)")
    if "instances" in document:
        return read_instances(plans, document["instances"]), True
    return _read_columns(plans, document["inputs"]), False


def read_instances(plans: InputPlans, instances: object) -> Inputs:
    """The row form. Raises Failure(INVALID)."""
    if type(instances) is not list and type(instances) is not NumberList:
        raise invalid("Expected 'instances' to be a list")
    if not instances:
        raise invalid("'instances' is empty")
    if type(instances) is list and all(type(one) is dict and not is_b64(one) for one in instances):
        return _join_rows(plans, {name: _column(instances, name) for name in _names(plans, instances)})
    if len(plans) != 1:
        raise invalid(f"the model takes {len(plans)} inputs: each instance is an object {{input: value}}")
    plan = next(iter(plans))
    return join(plans, {plan.name: from_lists(plan, instances)})


def _names(plans: InputPlans, instances: list[dict[str, Any]]) -> list[str]:
    names = list(instances[0])
    for at, one in enumerate(instances):
        if len(one) != len(names) or any(name not in one for name in names):
            raise invalid(f"instances[{at}] names other inputs than instances[0]")
    for name in names:
        plans.named(name)
    return names


def _column(instances: list[dict[str, Any]], name: str) -> list[Any]:
    return [one[name] for one in instances]


def _join_rows(plans: InputPlans, columns: dict[str, list[Any]]) -> Inputs:
    return join(plans, {name: from_lists(plans.named(name), column) for name, column in columns.items()})


def _read_columns(plans: InputPlans, inputs: object) -> Inputs:
    if type(inputs) is dict and not is_b64(inputs):
        return join(plans, {name: from_lists(plans.named(name), value) for name, value in inputs.items()})
    if len(plans) != 1:
        raise invalid(f"the model takes {len(plans)} inputs: 'inputs' is an object {{input: tensor}}")
    plan = next(iter(plans))
    return join(plans, {plan.name: from_lists(plan, inputs)})


def write_predict(signature: Signature, outputs: Sequence[OutputTensor], *, row_form: bool) -> bytes:
    """The reply. Outputs whose name ends in `_bytes` are written as base64. Raises Failure(INVALID)."""
    if row_form:
        return b'{"predictions":%b}' % _rows(signature, outputs)
    texts = _texts(signature, outputs)
    if len(texts) == 1:
        return b'{"outputs":%b}' % texts[0]
    return b'{"outputs":%b}' % _object(_keys(signature), texts)


def _keys(signature: Signature) -> list[bytes]:
    return [orjson.dumps(spec.name) for spec in signature.outputs]


def _object(keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    return b"{%b}" % b",".join([b"%b:%b" % pair for pair in zip(keys, values, strict=True)])


def _texts(signature: Signature, outputs: Sequence[OutputTensor]) -> list[bytes]:
    return [
        text_of(output, b64=spec.name.endswith(_BYTES_SUFFIX))
        for spec, output in zip(signature.outputs, outputs, strict=True)
    ]


def _rows(signature: Signature, outputs: Sequence[OutputTensor]) -> bytes:
    for spec, output in zip(signature.outputs, outputs, strict=True):
        if not output.shape or output.shape[0] != outputs[0].shape[0]:
            raise invalid(f"output '{spec.name}' has no row for each instance: use 'inputs' (column form)")
    if len(outputs) == 1:
        return _texts(signature, outputs)[0]
    keys = _keys(signature)
    rows = zip(*map(rows_of, outputs), strict=True)
    return b"[%b]" % b",".join([_object(keys, _texts(signature, row)) for row in rows])


# --- classify and regress ---


def read_examples(plans: InputPlans, document: dict[str, Any]) -> Inputs:
    """`examples`, each `{feature: value or list}`, with the features of `context` added. Raises Failure(INVALID)."""
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
    names = _names(plans, merged)
    return join(plans, {name: _feature(plans, merged, name) for name in names})


def _feature(plans: InputPlans, examples: list[dict[str, Any]], name: str) -> CheckedInput:
    """A feature's values as rows: a value alone is a list of one where the input has columns."""
    plan = plans.named(name)
    column = _column(examples, name)
    if len(plan.shape) == 2:
        column = [value if type(value) in {list, NumberList} else [value] for value in column]
    return row_of_lists(plan, column)


def write_classes(outputs: Sequence[OutputTensor], labels: Sequence[str]) -> bytes:
    """`result`: for each example its [label, score] pairs, in the model's order; without `labels` the numbers of classes.

    Raises Failure(INVALID) unless there is one output of numbers, (rows, classes).
    """
    if len(outputs) != 1 or isinstance(outputs[0].array, list) or len(outputs[0].shape) != 2:
        raise invalid("the model cannot classify: it has not one output of scores, (rows, classes); use :predict")
    names = [orjson.dumps(labels[at] if at < len(labels) else str(at)) for at in range(outputs[0].shape[1])]
    rows = [
        b"[%b]" % b",".join([b"[%b,%b]" % pair for pair in zip(names, map(text_of, rows_of(row)), strict=True)])
        for row in rows_of(outputs[0])
    ]
    return b'{"result":[%b]}' % b",".join(rows)


def write_values(outputs: Sequence[OutputTensor]) -> bytes:
    """`result`: a value for each example. Raises Failure(INVALID) unless there is one output of one number a row."""
    if len(outputs) != 1 or isinstance(outputs[0].array, list) or not _one_a_row(outputs[0].shape):
        raise invalid("the model cannot regress: it has not one output of one number a row; use :predict")
    output = outputs[0]
    return b'{"result":%b}' % text_of(output._replace(shape=(output.shape[0],)))


def _one_a_row(shape: tuple[int, ...]) -> bool:
    return bool(shape) and all(dim == 1 for dim in shape[1:])
