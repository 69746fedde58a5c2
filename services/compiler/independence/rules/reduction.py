"""Reductions, and what else works along some axes: rows are on none of them."""

from __future__ import annotations

from services.compiler.independence.expression import ONE, Expression
from services.compiler.independence.node import Call, Rule, Rules, constant, dims_of, known_content, normalized
from services.compiler.independence.rules.normalization import check_axis, same
from services.compiler.independence.value import Dependent, Rows, Value, free, rowed

_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()  # noqa: SIM905


def without_axes(value: Value, dropped: set[int], keep: bool) -> Value:
    """The value without `dropped` axes, or with size 1 there."""
    dims: list[Expression] = []
    rows: Rows | None = None
    for axis, size in enumerate(dims_of(value)):
        if value.rows is not None and axis == value.rows.axis:
            if axis in dropped:
                raise Dependent("it combines all rows")
            rows = value.rows.moved(len(dims))
        if axis not in dropped:
            dims.append(size)
        elif keep:
            dims.append(ONE)
    return free(dims) if rows is None else rowed(dims, rows)


def reduce(call: Call) -> list[Value]:
    """Axes are an attribute, later an operand; without any, all axes or none."""
    call.only_rowed(0)
    value = call.input(0)
    rank = len(dims_of(value))
    axes = call.integers(1, "axes")
    if not axes:
        if call.attribute("noop_with_empty_axes", 0):
            return [same(value)]
        axes = list(range(rank))
    dropped = {normalized(axis, rank) for axis in axes}
    return [without_axes(value, dropped, bool(call.attribute("keepdims", 1)))]


def arg(call: Call) -> list[Value]:
    value = call.input(0)
    axis = call.axis(len(dims_of(value)), 0)
    return [without_axes(value, {axis}, bool(call.attribute("keepdims", 1)))]


def cumulative(call: Call) -> list[Value]:
    """The axis is an operand."""
    value = call.input(0)
    axis = constant(known_content(call.input(1)).flat[0])
    check_axis(value, normalized(axis, len(dims_of(value))))
    return [same(value)]


def top_k(call: Call) -> list[Value]:
    """The k largest along an axis and where they were."""
    call.only_rowed(0)
    value = call.input(0)
    dims = list(dims_of(value))
    axis = call.axis(len(dims), -1)
    check_axis(value, axis)
    dims[axis] = call.symbols.fresh()
    result = free(dims) if value.rows is None else rowed(dims, value.rows)
    return [result, result]


RULES: Rules = {
    **{f"Reduce{name}": Rule(reduce) for name in _REDUCTIONS},
    "ArgMax": Rule(arg),
    "ArgMin": Rule(arg),
    "CumProd": Rule(cumulative),
    "CumSum": Rule(cumulative),
    "TopK": Rule(top_k),
}
