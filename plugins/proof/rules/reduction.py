"""Reductions, and other operators that work along some axes: the axis of the rows must not be among them."""

from __future__ import annotations

from millstream.plugins.proof.expression import ONE, Expression, number
from millstream.plugins.proof.node import Call, Rule, Rules, constant, dims_of, known_content, normalized
from millstream.plugins.proof.rules.normalization import check_axis, same
from millstream.plugins.proof.value import Dependent, Rows, Value, free, rowed

_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()  # noqa: SIM905


def without_axes(value: Value, dropped: set[int], keep: bool) -> Value:
    """Return the value without the `dropped` axes, or (`keep`) with size 1. Raises Dependent for the rows' axis."""
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
    """Rule of Reduce…: axes are an attribute, in later opsets an operand; without axes, all axes or none."""
    call.only_rowed(0)
    value = call.input(0)
    rank = len(dims_of(value))
    axes = call.integers(1, "axes")
    if not axes:
        if call.flag("noop_with_empty_axes"):
            return [same(value)]
        axes = list(range(rank))
    dropped = {normalized(axis, rank) for axis in axes}
    return [without_axes(value, dropped, call.flag("keepdims", default=True))]


def arg(call: Call) -> list[Value]:
    value = call.input(0)
    axis = call.axis(len(dims_of(value)), 0)
    return [without_axes(value, {axis}, call.flag("keepdims", default=True))]


def cumulative(call: Call) -> list[Value]:
    """Rule of CumSum and CumProd, whose axis is an operand."""
    value = call.input(0)
    axis = constant(known_content(call.input(1)).flat[0])
    check_axis(value, normalized(axis, len(dims_of(value))))
    return [same(value)]


def top_k(call: Call) -> list[Value]:
    """Rule of TopK: the k largest elements along an axis, and their positions."""
    call.only_rowed(0)
    value = call.input(0)
    dims = list(dims_of(value))
    axis = call.axis(len(dims), -1)
    check_axis(value, axis)
    dims[axis] = _how_many(call)
    result = free(dims) if value.rows is None else rowed(dims, value.rows)
    return [result, result]


def _how_many(call: Call) -> Expression:
    """Return k of TopK, an attribute before opset 10."""
    if call.version < 10:
        return number(int(call.attribute("k", 0)))
    content = call.input(1).content
    element = content.flat[0] if content is not None and content.size == 1 else None
    return element if isinstance(element, Expression) else call.symbols.fresh()


def spectrum(call: Call) -> list[Value]:
    """Rule of DFT: the axis is an attribute before opset 20; the last axis holds real and imaginary parts."""
    call.only_rowed(0)
    value = call.input(0)
    dims = list(dims_of(value))
    axis = call.axis(len(dims), 1)
    if call.version >= 20:
        axis_operand = call.optional(2)
        axis = normalized(-2 if axis_operand is None else constant(known_content(axis_operand).flat[0]), len(dims))
    for changed in (axis, len(dims) - 1):
        check_axis(value, changed)
        dims[changed] = call.symbols.fresh()
    return [free(dims) if value.rows is None else rowed(dims, value.rows)]


def short_time_spectrum(call: Call) -> list[Value]:
    """Rule of STFT: [batch, length, …] to [batch, frames, frequencies, 2]."""
    call.only_rowed(0)
    value = call.input(0)
    if value.rows is None:
        return [free()]
    if value.rows.axis != 0:
        raise Dependent("the rows are not on the batch axis")
    return [rowed([dims_of(value)[0], *(call.symbols.fresh() for _ in range(3))], value.rows)]


RULES: Rules = {
    **{f"Reduce{name}": Rule(reduce) for name in _REDUCTIONS},
    "ArgMax": Rule(arg),
    "ArgMin": Rule(arg),
    "CumProd": Rule(cumulative),
    "CumSum": Rule(cumulative),
    "DFT": Rule(spectrum),
    "STFT": Rule(short_time_spectrum),
    "TopK": Rule(top_k),
}
