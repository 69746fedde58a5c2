"""Normalization and Softmax: no operator may compute statistics over the axis of the rows."""

from __future__ import annotations

from millstream.plugins.proof.alignment import elementwise
from millstream.plugins.proof.expression import ONE
from millstream.plugins.proof.node import Call, Rule, Rules, dims_of, normalized
from millstream.plugins.proof.rules.convolution import batch
from millstream.plugins.proof.value import Dependent, Value, free, rowed

_SOFTMAX_ONE_AXIS_OPSET = 13


def check_axis(value: Value, axis: int) -> None:
    """Raise Dependent if the rows are on this axis."""
    if value.rows is not None and value.rows.axis == axis:
        raise Dependent("it works along the axis of the rows")


def same(value: Value) -> Value:
    """Return a value of the same shape and row layout."""
    return Value(value.dims, value.rows)


def softmax(call: Call) -> list[Value]:
    """Rule of Softmax, LogSoftmax and Hardmax; before opset 13 they combine all axes from `axis` on."""
    value = call.input(0)
    rank = len(dims_of(value))
    flattening = call.version < _SOFTMAX_ONE_AXIS_OPSET
    axis = call.axis(rank, 1 if flattening else -1)
    if flattening and value.rows is not None and value.rows.axis >= axis:
        raise Dependent(f"before opset {_SOFTMAX_ONE_AXIS_OPSET} it works along all axes from axis {axis} on")
    check_axis(value, axis)
    return [same(value)]


def batch_normalization(call: Call) -> list[Value]:
    """Rule of BatchNormalization with stored statistics; in training mode it computes them over the batch."""
    call.only_rowed(0)
    value, rows = batch(call)
    if _trains(call):
        raise Dependent("in training mode it computes statistics over the batch")
    if rows is not None and len(dims_of(value)) < 2:
        raise Dependent("its input has no channels")
    return [same(value)]


def _trains(call: Call) -> bool:
    if call.version >= 14:
        return call.flag("training_mode")
    if call.version >= 7:
        return call.outputs > 1
    return not call.flag("is_test")


def instance_normalization(call: Call) -> list[Value]:
    """Rule of InstanceNormalization and GroupNormalization: statistics per row and channel, or group of channels."""
    call.only_rowed(0)
    value, _ = batch(call)
    return [same(value)]


def local_response(call: Call) -> list[Value]:
    value, _ = batch(call)
    return [same(value)]


def layer_normalization(call: Call) -> list[Value]:
    """Rule of LayerNormalization: statistics over all axes from `axis` on; scale and bias are broadcast."""
    value = call.input(0)
    dims = dims_of(value)
    axis = call.axis(len(dims), -1)
    if value.rows is not None and value.rows.axis >= axis:
        raise Dependent("it computes statistics over the axis of the rows")
    bias = call.optional(2)
    result = elementwise(call.symbols, [value, call.input(1), *([] if bias is None else [bias])])
    if result.rank != len(dims) or result.rows != value.rows:
        raise Dependent("its scale has axes or rows that its input does not have")
    statistics = [*dims[:axis], *([ONE] * (len(dims) - axis))]
    moments = free(statistics) if value.rows is None else rowed(statistics, value.rows)
    return [result, *([moments] * (call.outputs - 1))]


def over_axes(call: Call) -> list[Value]:
    """Rule of MeanVarianceNormalization, which by default also computes statistics over the batch."""
    value = call.input(0)
    axes = call.attribute("axes", [0, 2, 3]) or range(len(dims_of(value)))
    for axis in axes:
        check_axis(value, normalized(int(axis), len(dims_of(value))))
    return [same(value)]


def along_axis(default: int) -> Rule:
    """Return the rule of operators along the axis that the attribute `axis` names."""

    def apply(call: Call) -> list[Value]:
        value = call.input(0)
        check_axis(value, call.axis(len(dims_of(value)), default))
        return [same(value)]

    return Rule(apply)


RULES: Rules = {
    "BatchNormalization": Rule(batch_normalization),
    "GroupNormalization": Rule(instance_normalization),
    "Hardmax": Rule(softmax),
    "InstanceNormalization": Rule(instance_normalization),
    "LRN": Rule(local_response),
    "LayerNormalization": Rule(layer_normalization),
    "LogSoftmax": Rule(softmax),
    "LpNormalization": along_axis(-1),
    "MeanVarianceNormalization": Rule(over_axes),
    "RMSNormalization": Rule(layer_normalization),
    "SimplifiedLayerNormalization": Rule(layer_normalization),  # ONNX Runtime keeps it in this domain
    "Softmax": Rule(softmax),
}
