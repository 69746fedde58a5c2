"""MLflow's bodies with a pandas DataFrame -> the inputs of a version. Pure.

{"dataframe_split": {"columns", "data"}} ─┬─> columns with the names of inputs: a column is an input
{"dataframe_records": [{column: value}]} ─┘   any other columns, one input: a line is a row of it, in the order of the
                                              columns
A version whose columns have names (named_columns.py) has them matched by name.

Source: MLflow, "Deploy MLflow Model as a Local Inference Server", accepted input formats. MLflow's server drops
`params` that a model's signature does not have, with a warning in its log. They are refused here: no model has any, and
a caller who sends `top_k` would take another answer for the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.gateway.tensors.column_categories import Values
from millstream.gateway.tensors.input_plans import CheckedInput, InputPlans, Inputs, join
from millstream.gateway.tensors.inputs import InputPlan
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.tensors.named_columns import values_of
from millstream.gateway.tensors.nested_lists import from_lists
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.prepared import expect_tensors
from millstream.services.errors import invalid
from millstream.services.model.datatypes import FLOATS

SPLIT, RECORDS = "dataframe_split", "dataframe_records"
_NAN = float("nan")
_OUTPUTS = b'{"outputs":'


def is_dataframe(document: object) -> bool:
    """Whether a JSON body holds a DataFrame."""
    return type(document) is dict and (SPLIT in document or RECORDS in document)


def read_dataframe(plans: InputPlans, document: dict[str, Any]) -> Inputs:
    """Return the inputs in a document for which `is_dataframe` holds. Raises Failure(INVALID)."""
    others = [name for name in (SPLIT, RECORDS, "instances", "inputs") if name in document]
    if len(others) > 1:
        raise invalid(f"give one of {SPLIT}, {RECORDS}, instances and inputs, not {' and '.join(others)}")
    columns, lines = _of_split(document[SPLIT]) if SPLIT in document else _of_records(document[RECORDS])
    if not len(columns):
        raise invalid("the DataFrame has no columns")
    expect_tensors(plans, columns)
    known = plans.columns
    if known is not None and not all(name in plans.by_name and not known.any_of([name]) for name in columns):
        if columns != [str(at) for at in range(len(known.names))] or "0" in known.names:
            return known.inputs(_values(columns, lines))
        return known.inputs(_values(known.names, lines), named=False)
    if all(name in plans.by_name for name in columns):
        return _by_column(plans, columns, lines)
    if len(plans) == 1:
        return _by_line(plans, columns, lines)
    inputs = ", ".join(plan.name for plan in plans)
    unknown = next(name for name in columns if name not in plans.by_name)
    raise invalid(f"column '{excerpt(unknown)}' is no input of the model: its inputs are {excerpt(inputs)}")


def check_params(document: object) -> None:
    """Raise Failure(INVALID) if a body has `params` of MLflow; none of them means that it may be there."""
    params = document.get("params") if type(document) is dict else None
    if not params:
        return
    names = excerpt(", ".join(map(str, params))) if type(params) is dict else "no object"
    raise invalid(f"the model takes no params ({names}): leave them out of the body")


def with_predictions(text: bytes) -> bytes:
    """Return a reply in column form, whose tensors SageMaker's callers read as `outputs`, MLflow's as `predictions`."""
    tensors = text.removeprefix(_OUTPUTS)[:-1]
    return b'{"predictions":%b,"outputs":%b}' % (tensors, tensors)


def _of_split(value: object) -> tuple[list[str], Any]:
    """Return the columns and the lines of a DataFrame in pandas' orientation `split`."""
    if type(value) is not dict or "data" not in value:
        raise invalid(f"'{SPLIT}' is an object with 'columns' and 'data'")
    lines = value["data"]
    if type(lines) is not list and type(lines) is not NumberList:
        raise invalid(f"'data' of '{SPLIT}' is a list of lines")
    columns = value.get("columns")
    if columns is None and type(lines) is list and lines and type(lines[0]) is list:
        columns = list(range(len(lines[0])))  # as pandas names columns that have no names
    if type(columns) is not list:
        raise invalid(f"'columns' of '{SPLIT}' is a list of names")
    names = [str(name) for name in columns]
    if len(set(names)) != len(names):
        raise invalid(f"a column of '{SPLIT}' is there twice")
    if type(lines) is list:
        for at, line in enumerate(lines):
            if type(line) is list and len(line) != len(names):
                raise invalid(f"line {at} of '{SPLIT}' has {len(line)} values for {len(names)} columns")
            if type(line) is not list and type(line) is not NumberList:
                raise invalid(f"line {at} of '{SPLIT}' is a list of values")
    return names, lines


def _of_records(value: object) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the lines of a DataFrame in pandas' orientation `records`."""
    if type(value) is not list or not value or any(type(record) is not dict for record in value):
        raise invalid(f"'{RECORDS}' is a list of objects {{column: value}}, and not empty")
    names = list(value[0])
    for at, record in enumerate(value):
        if record.keys() != value[0].keys():
            raise invalid(f"record {at} of '{RECORDS}' has other columns than record 0")
    return names, [[record[name] for name in names] for record in value]


def _values(columns: Sequence[str], lines: Any) -> dict[str, Values]:
    """Return the values of each column."""
    if type(lines) is not NumberList:
        cells = zip(*map(_cells, lines), strict=True) if lines else [()] * len(columns)
        return {name: values_of(name, list(column)) for name, column in zip(columns, cells, strict=True)}
    try:
        table = np.concatenate([np.array(some) for some in lines.rows()])
    except ValueError:  # lines of different lengths
        table = np.empty(0)
    if lines.leading_ones == 1 and table.ndim == 1:  # one long line
        table = table[None]
    if table.ndim != 2 or table.shape[1] != len(columns) or table.dtype.kind not in "biuf":
        raise invalid(f"the lines of the DataFrame are no lists of {len(columns)} numbers")
    return {name: table[:, at] for at, name in enumerate(columns)}


def _by_column(plans: InputPlans, columns: Sequence[str], lines: Any) -> Inputs:
    """Return the inputs whose names the columns have."""
    if type(lines) is NumberList:
        lines = [line for some in lines.rows() for line in some]
    by_name = {}
    for at, name in enumerate(columns):
        plan = plans.named(name)
        by_name[name] = _column(plan, [_cells(line)[at] for line in lines])
    return join(plans, by_name)


def _cells(line: Any) -> list[Any]:
    return [cell for some in line.rows() for cell in some] if type(line) is NumberList else line


def _column(plan: InputPlan, cells: list[Any]) -> CheckedInput:
    if len(plan.shape) == 2 and all(type(cell) not in {list, NumberList} for cell in cells):
        return from_lists(plan, [[_number(plan, cell)] for cell in cells])
    return from_lists(plan, [_number(plan, cell) for cell in cells])


def _by_line(plans: InputPlans, columns: Sequence[str], lines: Any) -> Inputs:
    """Return the only input, whose rows are the lines."""
    plan = next(iter(plans))
    if type(lines) is list:
        lines = [line if type(line) is NumberList else [_number(plan, cell) for cell in line] for line in lines]
    checked = from_lists(plan, lines)
    found = checked.extent.shape[1:]
    if len(found) == 1 and found[0] != len(columns):
        raise invalid(f"lines of {found[0]} values for {len(columns)} columns")
    return join(plans, {plan.name: checked})


def _number(plan: InputPlan, cell: Any) -> Any:
    """Return a cell as the input has it: pandas writes the NaN of a float column as null, and has no other null.

    In columns of other datatypes a null is refused, as MLflow refuses it for those of its signature.
    """
    return _NAN if cell is None and plan.datatype in FLOATS else cell
