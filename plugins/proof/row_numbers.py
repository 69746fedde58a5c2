"""Follows row numbers that select each row's own elements: x[arange(rows), position], as exporters write it.

Range(0, rows, 1) creates the numbers; operators that only move or repeat elements preserve them; Gather, GatherND and
ScatterND that index rows with their own number stay within a row. For all other operators the value is counted.

TorchScript looks x[arange(rows), arange(n)] up in all rows as one sequence, at number * length + place. As every place
from 0 to n - 1 is looked up in every row, also in the last one, a place beyond the length is beyond the sequence: such
a run fails, for one row as for many. So no run reads another row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onnx import TensorProto

from millstream.plugins.proof.expression import ONE, ROWS, ZERO, Expression, number
from millstream.plugins.proof.node import Call, dims_of
from millstream.plugins.proof.rules import layout
from millstream.plugins.proof.rules.elementwise import broadcast_dims
from millstream.plugins.proof.value import Dependent, Numbers, Rows, Value, rowed

_WHOLE_NUMBERS = frozenset({TensorProto.INT64, TensorProto.INT32})


def follow(call: Call) -> list[Value] | None:
    """Return the outputs of an operator that preserves or indexes with row numbers; None for any other operator."""
    if call.domain != "":
        return None
    if call.op in _MOVING and call.inputs and call.inputs[0] is not None and call.inputs[0].span is not None:
        return _moved_span(call, call.inputs[0])
    rule = _RULES.get(call.op)
    if rule is None or not any(value is not None and value.numbers for value in call.inputs):
        return None
    result = rule(call)
    return None if result is None else [result]


def numbers(call: Call) -> Value | None:
    """Return the row numbers if Range counts the rows from 0, or the numbers below a size; None for another Range."""
    bounds = [value.content.flat[0] for value in call.inputs if value is not None and value.content is not None]
    if bounds == [ZERO, ROWS, ONE]:
        return Value((ROWS,), counted=True, numbers=Numbers(0))
    limit = bounds[1] if len(bounds) == 3 and bounds[::2] == [ZERO, ONE] else None
    if isinstance(limit, Expression) and limit.known_natural and not limit.counted:
        return Value((limit,), span=limit)
    return None


def _moved_span(call: Call, value: Value) -> list[Value] | None:
    """Return the same numbers in another shape."""
    if call.op == "Cast" and call.attribute("to", 0) not in _WHOLE_NUMBERS:
        return None
    plain = call.with_inputs([replace(value, span=None), *call.inputs[1:]])
    moved = value if call.op in {"Cast", "Identity"} else layout.RULES[call.op].apply(plain)[0]
    return [replace(moved, span=value.span)] if moved.free else None


def _span(value: Value) -> Expression | None:
    """Return n if the elements are all numbers from 0 to n - 1, each at least once."""
    if value.content is None:
        return value.span
    found = {element.constant if isinstance(element, Expression) else None for element in value.content.flat}
    return number(len(found)) if found == set(range(len(found))) else None


def _multiplied(call: Call) -> Value | None:
    """Return row numbers times a size."""
    counted, factor = _numbers_and_other(call)
    if counted is None or factor is None or factor.content is None or factor.content.size != 1:
        return None
    place, size = counted.numbers, factor.content.flat[0]
    if place is None or place.span != ONE or not isinstance(size, Expression) or size.counted:
        return None
    return _broadcast(call, counted, place._replace(stride=place.stride * size))


def _added(call: Call) -> Value | None:
    """Return row numbers plus every number below a size: the other operand is the same for all rows."""
    counted, other = _numbers_and_other(call)
    span = None if other is None else _span(other)
    if counted is None or other is None or span is None or counted.numbers is None or counted.numbers.span != ONE:
        return None
    from_last = len(dims_of(counted)) - counted.numbers.axis
    if len(dims_of(other)) >= from_last and dims_of(other)[-from_last] != ONE:
        return None
    return _broadcast(call, counted, counted.numbers._replace(span=span))


def _numbers_and_other(call: Call) -> tuple[Value | None, Value | None]:
    """Return the operand with row numbers alone, and the other one, which is free."""
    one, other = call.input(0), call.input(1)
    counted, free = (one, other) if one.numbers is not None else (other, one)
    if counted.numbers is None or counted.numbers.leading or not free.free or free.dims is None:
        return None, None
    return counted, free


def _broadcast(call: Call, counted: Value, place: Numbers) -> Value | None:
    dims = broadcast_dims(call)[0].dims
    if dims is None:
        return None
    moved = place._replace(axis=place.axis + len(dims) - len(dims_of(counted)))
    return Value(dims, counted=True, numbers=moved)


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
    return _numbered(layout.RULES[call.op].apply(moving)[0], call.input(0).numbers or Numbers(0))


def _numbered(value: Value, place: Numbers) -> Value | None:
    rows = value.rows
    if rows is None or rows.outer != ONE or rows.inner != ONE:
        return None
    return Value(value.dims, counted=True, numbers=place._replace(axis=rows.axis))


def _concatenated(call: Call) -> Value | None:
    """Return the result of Concat of row numbers and rowed values along the last axis: index tuples."""
    first = call.input(0)
    rank = len(dims_of(first))
    if (
        first.numbers is None
        or not _is_plain(first.numbers)
        or dims_of(first)[-1] != ONE
        or call.axis(rank, 0) != rank - 1
    ):
        return None
    if any(value is None or value.rows is None for value in call.inputs[1:]):
        return None  # row numbers in a further column would depend on the position of a row
    joined = layout.concat(call.with_inputs([_as_rows(first), *call.inputs[1:]]))[0]
    return _numbered(joined, first.numbers._replace(leading=True))


def _is_plain(place: Numbers) -> bool:
    return place.stride == place.span == ONE


def _depth(indices: Value) -> int:
    """Return the number of columns of an index whose first column holds row numbers. Raises Dependent."""
    depth = dims_of(indices)[-1].constant
    place = indices.numbers
    if (
        place is None
        or not _is_plain(place)
        or not depth
        or place.axis == len(dims_of(indices)) - 1
        or (depth > 1 and not place.leading)
    ):
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
    place, rows = indices.numbers, data.rows
    if place is None or place.leading or rows is None or rows != Rows(0, ONE, place.stride):
        return None
    if call.axis(len(dims_of(data)), 0) != 0:
        return None
    return rowed([*dims_of(indices), *dims_of(data)[1:]], Rows(place.axis))


#: operators that preserve numbers, whatever they count
_MOVING = frozenset({"Cast", "Expand", "Identity", "Reshape", "Unsqueeze"})

_RULES: dict[str, Callable[[Call], Value | None]] = {
    "Add": _added,
    "Cast": _moved,
    "Concat": _concatenated,
    "Expand": _moved,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Identity": _moved,
    "Mul": _multiplied,
    "Reshape": _moved,
    "ScatterND": _scatter_nd,
    "Unsqueeze": _moved,
}
