"""Convolutions and pooling: axis 0 is the batch, every other axis takes part in a window or a sum over channels."""

from __future__ import annotations

from millstream.plugins.proof.expression import ONE, Expression, number
from millstream.plugins.proof.node import Call, Rule, Rules, dims_of, unknown_dims
from millstream.plugins.proof.value import Dependent, Rows, Value, depends_on_count, free, rowed


def batch(call: Call, index: int = 0, rank: int | None = None) -> tuple[Value, Rows | None]:
    """Return operand `index` and its row layout. Raises Dependent for rows not on axis 0, and for another rank."""
    value = call.input(index)
    if value.rows is not None and value.rows.axis != 0:
        raise Dependent("the rows are not on the batch axis")
    if rank is not None and value.dims is not None and len(value.dims) != rank:
        raise Dependent(f"its input has {len(value.dims)} axes, not {rank}")
    return value, value.rows


def batched(dims: list[Expression], rows: Rows | None) -> Value:
    """Return a value with the rows of the input on axis 0."""
    return free(dims) if rows is None else rowed([rows.size, *dims[1:]], rows)


def convolution(call: Call) -> list[Value]:
    """Rule of Conv: X [batch, channels, space …], weights [outputs, channels / group, kernel …]."""
    call.only_rowed(0)
    value, rows = batch(call)
    dims, weights = dims_of(value), dims_of(call.input(_weights(call)))
    space = [_window(call, size, axis, weights[axis + 2]) for axis, size in enumerate(dims[2:])]
    return [batched([dims[0], weights[0], *space], rows)]


def _weights(call: Call) -> int:
    return 3 if call.op == "QLinearConv" else 1


def transposed_convolution(call: Call) -> list[Value]:
    """Rule of ConvTranspose: X [batch, channels, space …], weights [channels, outputs / group, kernel …]."""
    call.only_rowed(0)
    value, rows = batch(call)
    dims, weights = dims_of(value), dims_of(call.input(1))
    channels = weights[1] * number(int(call.attribute("group", 1)))
    space = unknown_dims(call, len(dims) - 2)
    if call.attribute("auto_pad", b"NOTSET") == b"NOTSET" and not call.attribute("output_shape", None):
        space = [_spread(call, size, axis, weights[axis + 2]) for axis, size in enumerate(dims[2:])]
    return [batched([dims[0], channels, *space], rows)]


def _spread(call: Call, size: Expression, axis: int, kernel: Expression) -> Expression:
    """Return the size of an axis of ConvTranspose without automatic padding."""
    stride, dilation = (number(int(_at(call, name, axis, 1))) for name in ("strides", "dilations"))
    pads = list(call.attribute("pads", [])) or [0, 0] * (axis + 1)
    around = int(pads[axis]) + int(pads[len(pads) // 2 + axis]) - int(_at(call, "output_padding", axis, 0))
    return call.symbols.bounded(stride * (size - ONE) + (kernel - ONE) * dilation + ONE - number(around))


def pool(call: Call) -> list[Value]:
    """Rule of pooling over windows. The indices that MaxPool can return are positions in the whole batch."""
    value, rows = batch(call)
    dims = dims_of(value)
    if call.outputs > 1 and rows is not None:
        raise Dependent("its second output holds positions in the whole batch")
    kernel = [number(int(size)) for size in call.attribute("kernel_shape", [])]
    space = [_window(call, size, axis, kernel[axis]) for axis, size in enumerate(dims[2:])]
    return [batched([*dims[:2], *space], rows)] * call.outputs


def global_pool(call: Call) -> list[Value]:
    value, rows = batch(call)
    dims = dims_of(value)
    return [batched([*dims[:2], *([ONE] * (len(dims) - 2))], rows)]


def _window(call: Call, size: Expression, axis: int, kernel: Expression) -> Expression:
    """Return the number of positions of a window along one axis."""
    stride = int(_at(call, "strides", axis, 1))
    auto_pad = call.attribute("auto_pad", b"NOTSET")
    if size == ONE and kernel == ONE and stride == 1 and not call.attribute("pads", None):
        return ONE
    if auto_pad in {b"SAME_UPPER", b"SAME_LOWER"}:
        return size if stride == 1 else call.symbols.derived("same", size, stride)
    dilation = int(_at(call, "dilations", axis, 1))
    pads = list(call.attribute("pads", [])) if auto_pad == b"NOTSET" else []
    around = int(pads[axis]) + int(pads[len(pads) // 2 + axis]) if pads else 0
    span = size + number(around) - (kernel - ONE) * number(dilation) - ONE
    if stride == 1:
        return call.symbols.bounded(span + ONE)
    fixed = span.constant
    ceiling = call.flag("ceil_mode")
    if fixed is None or ceiling:
        return call.symbols.derived("window", span, stride, ceiling)
    return number(fixed // stride + 1)


def _at(call: Call, name: str, axis: int, default: int) -> int:
    values = call.attribute(name, None)
    return default if not values else values[axis]


def keep_batch(call: Call) -> list[Value]:
    """Rule of operators that keep rows on axis 0 and change other sizes according to their attributes."""
    call.only_rowed(0)
    value, rows = batch(call)
    dims = dims_of(value)
    return [batched([dims[0], *unknown_dims(call, len(dims) - 1)], rows)]


def sampled(call: Call) -> list[Value]:
    """Rule of GridSample: X [batch, channels, space …] sampled at positions [batch, space …, axes] of each row."""
    value, rows = batch(call)
    places, place_rows = batch(call, 1)
    if rows != place_rows:
        raise Dependent("only one of its inputs has rows")
    dims = dims_of(value)
    return [batched([*dims[:2], *dims_of(places)[1:-1]], rows)]


def deformable(call: Call) -> list[Value]:
    """Rule of DeformConv: a convolution with offsets (and a mask) that have the same rows."""
    value, rows = batch(call)
    offset, mask = call.input(2), call.optional(4)
    for other in (offset, mask):
        if other is not None and other.rows != rows:
            raise Dependent("only some of its inputs have rows")
    if any(weights is not None and weights.rows is not None for weights in (call.input(1), call.optional(3))):
        raise Dependent("its weights are computed from rows")
    dims = dims_of(value)
    return [batched([dims[0], *unknown_dims(call, len(dims) - 1)], rows)]


def affine_grid(call: Call) -> list[Value]:
    """Rule of AffineGrid: positions for each matrix of a batch; `size` is [batch, channels, space …]."""
    call.only_rowed(0)
    value, rows = batch(call)
    sizes = call.sizes(1)
    if rows is not None and (sizes[0] != rows.size or any(depends_on_count(size) for size in sizes[1:])):
        raise Dependent("its size is not that of its batch")
    return [batched([dims_of(value)[0], *unknown_dims(call, len(sizes) - 1)], rows)]


def determinant(call: Call) -> list[Value]:
    """Rule of Det: determinants of the matrices on the last two axes."""
    value = call.input(0)
    dims = dims_of(value)
    if value.rows is not None and value.rows.axis >= len(dims) - 2:
        raise Dependent("it combines all rows")
    return [free(dims[:-2]) if value.rows is None else rowed(dims[:-2], value.rows)]


RULES: Rules = {
    "AffineGrid": Rule(affine_grid, frozenset({1})),
    "AveragePool": Rule(pool),
    "Col2Im": Rule(keep_batch),
    "Conv": Rule(convolution),
    "ConvInteger": Rule(convolution),
    "ConvTranspose": Rule(transposed_convolution),
    "DeformConv": Rule(deformable),
    "Det": Rule(determinant),
    "DepthToSpace": Rule(keep_batch),
    "GlobalAveragePool": Rule(global_pool),
    "GlobalLpPool": Rule(global_pool),
    "GlobalMaxPool": Rule(global_pool),
    "GridSample": Rule(sampled),
    "LpPool": Rule(pool),
    "MaxPool": Rule(pool),
    "QLinearConv": Rule(convolution),
    "SpaceToDepth": Rule(keep_batch),
}
