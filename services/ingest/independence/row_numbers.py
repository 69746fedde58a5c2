"""Follows row numbers that select each row's own elements: x[arange(rows), position], as exporters write it.

Range(0, rows, 1) creates the numbers; operators that only move or repeat elements preserve them; Gather, GatherND and
ScatterND that index rows with their own number stay within a row. For all other operators the value is counted.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from millstream.services.ingest.independence.expression import ONE, ROWS, ZERO
from millstream.services.ingest.independence.node import Call, dims_of
from millstream.services.ingest.independence.rules import layout
from millstream.services.ingest.independence.value import Dependent, Numbers, Rows, Value, rowed

_WHOLE_NUMBERS = frozenset({TensorProto.INT64, TensorProto.INT32})


def follow(call: Call) -> list[Value] | None:
    """Return the outputs of an operator that preserves or indexes with row numbers; None for any other operator."""
    rule = _RULES.get(call.op) if call.domain == "" else None
    if rule is None or not any(value is not None and value.numbers for value in call.inputs):
        return None
    result = rule(call)
    return None if result is None else [result]


def numbers(call: Call) -> Value | None:
    """Return the row numbers if Range counts the rows from 0, else None."""
    bounds = [value.content.flat[0] for value in call.inputs if value is not None and value.content is not None]
    return Value((ROWS,), counted=True, numbers=Numbers(0)) if bounds == [ZERO, ROWS, ONE] else None


def _as_rows(value: Value) -> Value:
    """Return the row numbers as a value with rows, for rules that only move elements within rows."""
    if value.numbers is None or value.numbers.leading:
        raise Dependent("it computes with the number of rows")
    return rowed(dims_of(value), Rows(value.numbers.axis))


def _moved(call: Call) -> Value | None:
    if call.input(0).numbers is None or (call.op == "Cast" and call.attribute("to", 0) not in _WHOLE_NUMBERS):
        return None
    moving = call.with_inputs([_as_rows(call.input(0)), *call.inputs[1:]])
    if call.op in {"Cast", "Identity"}:
        return call.input(0)
    return _numbered(layout.RULES[call.op].apply(moving)[0], leading=False)


def _numbered(value: Value, leading: bool) -> Value | None:
    rows = value.rows
    if rows is None or rows.outer != ONE or rows.inner != ONE:
        return None
    return Value(value.dims, counted=True, numbers=Numbers(rows.axis, leading))


def _concatenated(call: Call) -> Value | None:
    """Return the result of Concat of row numbers and rowed values along the last axis: index tuples."""
    first = call.input(0)
    rank = len(dims_of(first))
    if first.numbers is None or dims_of(first)[-1] != ONE or call.axis(rank, 0) != rank - 1:
        return None
    if any(value is None or value.rows is None for value in call.inputs[1:]):
        return None  # row numbers in a further column would depend on the position of a row
    return _numbered(layout.concat(call.with_inputs([_as_rows(first), *call.inputs[1:]]))[0], leading=True)


def _depth(indices: Value) -> int:
    """Return the number of columns of an index whose first column holds row numbers. Raises Dependent."""
    depth = dims_of(indices)[-1].constant
    place = indices.numbers
    if place is None or not depth or place.axis == len(dims_of(indices)) - 1 or (depth > 1 and not place.leading):
        raise Dependent("rows are looked up by positions in the whole batch")
    return depth


def _has_plain_rows(value: Value) -> bool:
    return value.rows == Rows(0)


def _gather_nd(call: Call) -> Value | None:
    data, indices = call.input(0), call.input(1)
    if indices.numbers is None or not _has_plain_rows(data) or call.attribute("batch_dims", 0):
        return None
    depth = _depth(indices)
    return rowed([*dims_of(indices)[:-1], *dims_of(data)[depth:]], Rows(indices.numbers.axis))


def _scatter_nd(call: Call) -> Value | None:
    data, indices, updates = call.input(0), call.input(1), call.input(2)
    if indices.numbers is None or not _has_plain_rows(data) or updates.rows != Rows(indices.numbers.axis):
        return None
    _depth(indices)
    return Value(data.dims, data.rows)


def _gather(call: Call) -> Value | None:
    data, indices = call.input(0), call.input(1)
    if indices.numbers is None or indices.numbers.leading or not _has_plain_rows(data):
        return None
    if call.axis(len(dims_of(data)), 0) != 0:
        return None
    return rowed([*dims_of(indices), *dims_of(data)[1:]], Rows(indices.numbers.axis))


_RULES: dict[str, Callable[[Call], Value | None]] = {
    "Cast": _moved,
    "Concat": _concatenated,
    "Expand": _moved,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Identity": _moved,
    "Reshape": _moved,
    "ScatterND": _scatter_nd,
    "Unsqueeze": _moved,
}
