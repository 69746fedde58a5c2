"""Operators that choose elements by position: Slice, Gather, Scatter, Pad, Resize, OneHot."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.plugins.proof.expression import ONE, ZERO, Expression, number
from millstream.plugins.proof.node import Call, Rule, Rules, constant, dims_of, known_content, normalized
from millstream.plugins.proof.rules.normalization import check_axis, same
from millstream.plugins.proof.value import Dependent, Element, Value, depends_on_count, free, rowed

#: an end of at least this value covers a whole axis, however many elements each row has there
_ALL = 2**31 - 1


def with_dims(value: Value, dims: Sequence[Expression]) -> Value:
    """Return a value with other dimensions and the same row layout."""
    return free(dims) if value.rows is None else rowed(dims, value.rows)


def cut(call: Call) -> list[Value]:
    """Rule of Slice: starts, ends, axes and steps are attributes before opset 10."""
    call.only_rowed(0)
    value = call.input(0)
    dims = list(dims_of(value))
    axes = call.integers(3, "axes") or list(range(_slices(call)))
    for index, axis in enumerate(axes):
        axis = normalized(axis, len(dims))
        if value.rows is not None and axis == value.rows.axis:
            if not _is_whole(call, index, dims[axis]):
                raise Dependent("it selects some of the rows")
        else:
            if any(_bound_is_counted(call.optional(position), index) for position in (1, 2, 4)):
                raise Dependent("it selects a part whose position depends on the number of rows")
            dims[axis] = _extent(call, index, dims[axis])
    return [with_dims(value, dims)]


def _slices(call: Call) -> int:
    if call.version < 10:
        return len(call.attribute("starts", []))
    fixed = dims_of(call.input(1))[0].constant
    if fixed is None:
        raise Dependent("the number of its axes is not known")
    return fixed


def _bound_is_counted(value: Value | None, index: int) -> bool:
    """Return whether the bound at `index` may depend on the number of rows."""
    if value is None or value.content is None:
        return value is not None and value.counted
    return depends_on_count(value.content.flat[index])


def _bound(call: Call, position: int, name: str, index: int, default: int | None = None) -> Expression | None:
    if call.version < 10:
        values = call.attribute(name, None)
        return (None if default is None else number(default)) if values is None else number(int(values[index]))
    value = call.optional(position)
    if value is None:
        return None if default is None else number(default)
    element = value.content.flat[index] if value.content is not None else None
    return element if isinstance(element, Expression) else None


def _is_whole(call: Call, index: int, size: Expression) -> bool:
    start, end = _bound(call, 1, "starts", index), _bound(call, 2, "ends", index)
    step = _bound(call, 4, "steps", index, 1)
    fixed = None if end is None else end.constant
    long = end is not None and ((fixed or 0) >= _ALL or (end - size).known_natural)
    return start == ZERO and step == ONE and long


def _extent(call: Call, index: int, size: Expression) -> Expression:
    start, end = _bound(call, 1, "starts", index), _bound(call, 2, "ends", index)
    step = _bound(call, 4, "steps", index, 1)
    whole = size.constant
    first, last = (None if bound is None else bound.constant for bound in (start, end))
    stride = None if step is None else step.constant
    if first is None or last is None or not stride:
        return call.symbols.fresh()
    if whole is not None:
        return number(len(range(*slice(first, last, stride).indices(whole))))
    if first == 0 and last >= _ALL and stride == 1:
        return size
    return call.symbols.derived("slice", size, first, last, stride)


def gather(call: Call) -> list[Value]:
    """Rule of Gather: along an axis without rows, or rows of indices into data that all rows share."""
    data, indices = call.input(0), call.input(1)
    if data.rows is not None and indices.rows is not None:
        raise Dependent("rows are looked up by positions in the whole batch")
    shape, positions = dims_of(data), dims_of(indices)
    axis = call.axis(len(shape), 0)
    check_axis(data, axis)
    dims = [*shape[:axis], *positions, *shape[axis + 1 :]]
    if indices.rows is not None:
        return [rowed(dims, indices.rows.moved(axis + indices.rows.axis))]
    if data.rows is None:
        return [free(dims)]
    place = data.rows.axis
    return [rowed(dims, data.rows.moved(place if place < axis else place - 1 + len(positions)))]


def gather_elements(call: Call) -> list[Value]:
    """Rule of GatherElements: data and indices have the rows on the same axis, which is not the indexed one."""
    data, indices = call.input(0), call.input(1)
    axis = call.axis(len(dims_of(data)), 0)
    _check_same(data, indices, axis)
    return [same(indices)]


def _check_same(data: Value, other: Value, axis: int) -> None:
    check_axis(data, axis)
    if data.rows != other.rows:
        raise Dependent("only one of its inputs has rows, or they are laid out differently")


def gather_nd(call: Call) -> list[Value]:
    """Rule of GatherND: the indices' last axis holds positions; the first `batch_dims` axes equal those of the data."""
    data, indices = call.input(0), call.input(1)
    shape, positions = dims_of(data), dims_of(indices)
    shared = int(call.attribute("batch_dims", 0))
    depth = positions[-1].constant
    if depth is None:
        raise Dependent("the number of its index columns is not known")
    dims = [*positions[:-1], *shape[shared + depth :]]
    if indices.rows is not None and indices.rows.axis == len(positions) - 1:
        raise Dependent("a position combines values of several rows")
    if data.rows is not None and data.rows.axis < shared + depth:
        if data.rows.axis >= shared or indices.rows != data.rows:
            raise Dependent("rows are looked up by positions in the whole batch")
        return [rowed(dims, data.rows)]
    if data.rows is not None and indices.rows is not None:
        raise Dependent("rows of one input are combined with another axis of the other")
    if indices.rows is not None:
        if indices.rows.axis < shared:
            raise Dependent("only one of its inputs has rows")
        return [rowed(dims, indices.rows)]
    if data.rows is None:
        return [free(dims)]
    return [rowed(dims, data.rows.moved(len(positions) - 1 + data.rows.axis - shared - depth))]


def scatter_elements(call: Call) -> list[Value]:
    """Rule of ScatterElements: all three operands have the rows on the same axis, which is not the indexed one."""
    data = call.input(0)
    axis = call.axis(len(dims_of(data)), 0)
    for other in (call.input(1), call.input(2)):
        _check_same(data, other, axis)
    return [same(data)]


def scatter_nd(call: Call) -> list[Value]:
    """Rule of ScatterND: shared indices address axes before that of the rows; updates have rows as the data has."""
    data, indices, updates = call.input(0), call.input(1), call.input(2)
    depth = dims_of(indices)[-1].constant
    if data.rows is None or indices.rows is not None or depth is None or data.rows.axis < depth:
        raise Dependent("it writes to positions in the whole batch")
    if updates.rows != data.rows.moved(len(dims_of(indices)) - 1 + data.rows.axis - depth):
        raise Dependent("its updates do not have the rows of its data")
    return [same(data)]


def one_hot(call: Call) -> list[Value]:
    """Rule of OneHot: adds an axis of size `depth` at the attribute's position."""
    call.only_rowed(0)
    value = call.input(0)
    rank = len(dims_of(value)) + 1
    axis = call.axis(rank, -1)
    dims = [*dims_of(value)]
    dims.insert(axis, call.symbols.fresh())
    if value.rows is None:
        return [free(dims)]
    place = value.rows.axis
    return [rowed(dims, value.rows.moved(place + (place >= axis)))]


def pad(call: Call) -> list[Value]:
    """Rule of Pad: nothing may be added along the axis of the rows."""
    call.only_rowed(0)
    value = call.input(0)
    dims = list(dims_of(value))
    chosen = call.integers(3, "")
    axes = list(range(len(dims))) if chosen is None else [normalized(axis, len(dims)) for axis in chosen]
    if call.version < 11:
        around: list[Element] = [number(int(size)) for size in call.attribute("pads", call.attribute("paddings", []))]
    else:
        around = list(known_content(call.input(1)).flat)
    if len(around) != 2 * len(axes):
        raise Dependent("its padding does not fit its input")
    for index, axis in enumerate(axes):
        before, after = around[index], around[index + len(axes)]
        if value.rows is not None and axis == value.rows.axis:
            if constant(before) or constant(after):
                raise Dependent("it adds rows")
        elif isinstance(before, Expression) and isinstance(after, Expression):
            dims[axis] = call.symbols.bounded(dims[axis] + before + after)
        else:
            dims[axis] = call.symbols.fresh()
    return [with_dims(value, dims)]


def resize(call: Call) -> list[Value]:
    """Rule of Resize: the axis of the rows must keep its size, by a scale of 1 or an equal new size."""
    call.only_rowed(0)
    value = call.input(0)
    dims = dims_of(value)
    axes = call.attribute("axes", None) or range(len(dims))  # for ONNX Runtime an empty list means all axes
    chosen = [normalized(axis, len(dims)) for axis in axes]
    result = [call.symbols.fresh() if axis in chosen else size for axis, size in enumerate(dims)]
    if value.rows is None:
        return [free(result)]
    for operand in (call.optional(index) for index in range(1, len(call.inputs))):
        if operand is not None and operand.counted:
            _check_only(operand, chosen.index(value.rows.axis) if value.rows.axis in chosen else None)
    if value.rows.axis in chosen:
        _check_kept(call, chosen.index(value.rows.axis), dims[value.rows.axis])
    result[value.rows.axis] = dims[value.rows.axis]
    return [rowed(result, value.rows)]


def _check_only(sizes: Value, index: int | None) -> None:
    """Raise Dependent if another size than that at `index` depends on the number of rows."""
    if any(depends_on_count(item) for place, item in enumerate(known_content(sizes).flat) if place != index):
        raise Dependent("it resizes another axis by the number of rows")


def _check_kept(call: Call, index: int, size: Expression) -> None:
    if call.attribute("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise Dependent("one scale is computed from all axes, including that of the rows")
    if call.attribute("coordinate_transformation_mode", b"") == b"tf_crop_and_resize":
        raise Dependent("it may crop the rows")
    sizes = call.optional(3) if call.version >= 11 else None
    if sizes is not None and sizes.dims != (ZERO,):
        if known_content(sizes).flat[index] != size:
            raise Dependent("it changes the number of rows")
        return
    if call.op == "Upsample" and call.version < 9:
        scale: object = float(call.attribute("scales", [0.0] * (index + 1))[index])
    else:
        scale = known_content(call.input(2 if call.version >= 11 else 1)).flat[index]
    if scale not in (1.0, ONE):
        raise Dependent("it changes the number of rows")


def crop_or_pad(call: Call) -> list[Value]:
    """Rule of CenterCropPad: along axes without rows."""
    call.only_rowed(0)
    value = call.input(0)
    rank = len(dims_of(value))
    axes = {normalized(axis, rank) for axis in call.attribute("axes", None) or range(rank)}
    for axis in axes:
        check_axis(value, axis)
    return [
        with_dims(value, [call.symbols.fresh() if axis in axes else size for axis, size in enumerate(dims_of(value))])
    ]


RULES: Rules = {
    "CenterCropPad": Rule(crop_or_pad),
    "Gather": Rule(gather),
    "GatherElements": Rule(gather_elements),
    "GatherND": Rule(gather_nd),
    "OneHot": Rule(one_hot),
    "Pad": Rule(pad),
    "Resize": Rule(resize, frozenset({2, 3})),
    "Scatter": Rule(scatter_elements),
    "ScatterElements": Rule(scatter_elements),
    "ScatterND": Rule(scatter_nd),
    "Slice": Rule(cut, frozenset({1, 2})),
    "Upsample": Rule(resize, frozenset({1})),
}
