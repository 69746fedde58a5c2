"""Reads and writes JSON in row or column form, which several protocols share. Pure.

row form:    {"instances": [...]} ─> {"predictions": [...]}      each instance is one index of dimension 0
column form: {"inputs": ...}      ─> {"outputs": ...}            whole tensors
A list of objects is in row form under both names: KServe's servers take `inputs` for `instances`.
Source: TensorFlow Serving, "RESTful API"; KServe, "V1 Protocol".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from millstream.gateway.tensors.input_plans import InputPlans, Inputs, join
from millstream.gateway.tensors.named_columns import read_named
from millstream.gateway.tensors.nested_lists import from_lists, is_b64
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.outputs import OutputTensor, answered, json_of, rows_of
from millstream.services.errors import Failure, invalid
from millstream.services.model.signature import Signature, TensorSpec


def read_predict(plans: InputPlans, document: dict[str, Any]) -> tuple[Inputs, bool]:
    """Return the inputs, and whether they came in row form. Raises Failure(INVALID)."""
    if ("instances" in document) == ("inputs" in document):
        raise invalid("give either 'instances' (row form) or 'inputs' (column form)")
    if "instances" in document:
        return read_instances(plans, document["instances"]), True
    inputs = document["inputs"]
    if type(inputs) is list and inputs and _are_objects(inputs):
        return read_instances(plans, inputs), True
    return _read_columns(plans, inputs), False


def read_instances(plans: InputPlans, instances: object) -> Inputs:
    """Return the inputs in the row form. Raises Failure(INVALID)."""
    if type(instances) is not list and type(instances) is not NumberList:
        raise invalid("Expected 'instances' to be a list")
    if not instances:
        raise invalid("'instances' is empty")
    if type(instances) is list and _are_objects(instances):
        return _read_objects(plans, instances)
    if len(plans) != 1:
        raise invalid(f"the model takes {len(plans)} inputs: each instance is an object {{input: value}}")
    plan = next(iter(plans))
    return join(plans, {plan.name: from_lists(plan, instances)})


def _read_objects(plans: InputPlans, instances: list[dict[str, Any]]) -> Inputs:
    """Return the inputs in objects of names and values: each is a row, or a table of several rows.

    KServe's servers of tables make a DataFrame of each object, {column: [values]} or {column: {index: value}}.
    """
    names = row_names(instances)
    try:
        return read_named(plans, {name: [one[name] for one in instances] for name in names})
    except Failure:
        if not all(plans.is_column(name) for name in names):
            raise
        tables = [_table(at, one) for at, one in enumerate(instances)]
        if all(table is None for table in tables):
            raise
    rows: dict[str, list[Any]] = {name: [] for name in names}
    for at, table in enumerate(tables):
        if table is None:
            raise invalid(f"instances[{at}] is a row, and others are tables: {{column: [values]}}")
        for name in names:
            rows[name] += table[name]
    return read_named(plans, rows)


def _table(at: int, instance: dict[str, Any]) -> dict[str, list[Any]] | None:
    """Return the columns of an instance that is a table; None if it is none. Raises Failure(INVALID)."""
    kinds = set(map(type, instance.values()))
    if kinds == {dict}:
        index = next(iter(instance.values())).keys()
        if any(values.keys() != index for values in instance.values()):
            raise invalid(f"the columns of instances[{at}] have other indices than its first one")
        return {name: list(values.values()) for name, values in instance.items()}
    if not kinds <= {list, NumberList}:
        return None
    columns = {
        name: [one for some in values.rows() for one in some] if type(values) is NumberList else values
        for name, values in instance.items()
    }
    if len(set(map(len, columns.values()))) > 1:
        raise invalid(f"the columns of instances[{at}] have different numbers of values")
    return columns


def _are_objects(instances: list[Any]) -> bool:
    return all(type(one) is dict and not is_b64(one) for one in instances)


def row_names(instances: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of inputs or columns in `instances`, the same in each. Raises Failure(INVALID)."""
    names = list(instances[0])
    for at, one in enumerate(instances):
        if len(one) != len(names) or any(name not in one for name in names):
            raise invalid(f"instances[{at}] names other inputs than instances[0]")
    return names


def _read_columns(plans: InputPlans, inputs: object) -> Inputs:
    if type(inputs) is dict and not is_b64(inputs):
        return read_named(plans, inputs)
    if len(plans) != 1:
        raise invalid(f"the model takes {len(plans)} inputs: 'inputs' is an object {{input: tensor}}")
    plan = next(iter(plans))
    return join(plans, {plan.name: from_lists(plan, inputs)})


def write_predict(signature: Signature, outputs: Sequence[OutputTensor], *, row_form: bool) -> bytes:
    """Return the body of the reply; outputs whose name ends in `_bytes` become base64. Raises Failure(INVALID)."""
    specs, wanted = zip(*answered(signature, outputs), strict=True)
    if row_form:
        _check_rows(specs, wanted)
        if len(wanted) == 1:
            return b'{"predictions":%b}' % _texts(specs, wanted)[0]
        return b'{"predictions":[%b]}' % b",".join(_objects(specs, wanted))
    texts = _texts(specs, wanted)
    if len(texts) == 1:
        return b'{"outputs":%b}' % texts[0]
    return b'{"outputs":%b}' % _object(_keys(specs), texts)


def _keys(specs: Sequence[TensorSpec]) -> list[bytes]:
    return [orjson.dumps(spec.name) for spec in specs]


def _object(keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    return b"{%b}" % b",".join([b"%b:%b" % pair for pair in zip(keys, values, strict=True)])


def _texts(specs: Sequence[TensorSpec], outputs: Sequence[OutputTensor]) -> list[bytes]:
    return [json_of(spec, output) for spec, output in zip(specs, outputs, strict=True)]


def write_lines(signature: Signature, outputs: Sequence[OutputTensor]) -> bytes:
    """Return a line of JSON for each row: the only output, or an object of all by name. Raises Failure(INVALID)."""
    specs, wanted = zip(*answered(signature, outputs), strict=True)
    _check_rows(specs, wanted)
    if len(wanted) == 1:
        rows = [_texts(specs, [row])[0] for row in rows_of(wanted[0])]
    else:
        rows = _objects(specs, wanted)
    return b"".join([b"%b\n" % row for row in rows])


def _check_rows(specs: Sequence[TensorSpec], outputs: Sequence[OutputTensor]) -> None:
    for spec, output in zip(specs, outputs, strict=True):
        if not output.shape or output.shape[0] != outputs[0].shape[0]:
            raise invalid(f"output '{spec.name}' has no row for each instance: use 'inputs' (column form)")


def _objects(specs: Sequence[TensorSpec], outputs: Sequence[OutputTensor]) -> list[bytes]:
    """Return an object for each row, with the outputs by name."""
    keys = _keys(specs)
    rows = zip(*map(rows_of, outputs), strict=True)
    return [_object(keys, _texts(specs, row)) for row in rows]
