"""Operators that move elements: Reshape, Transpose, Concat, Split, Squeeze, Expand, Tile and similar ones."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.plugins.proof.alignment import broadcast
from millstream.plugins.proof.expression import ONE, ROWS, ZERO, Expression, number, product
from millstream.plugins.proof.node import Call, Rule, Rules, dims_of, normalized, unknown_dims
from millstream.plugins.proof.rules.normalization import check_axis
from millstream.plugins.proof.rules.reduction import without_axes
from millstream.plugins.proof.value import (
    Dependent,
    Dims,
    Element,
    Rows,
    Value,
    contents,
    depends_on_count,
    free,
    known,
    rowed,
)

_MINUS_ONE = number(-1)


def reshape(call: Call) -> list[Value]:
    """Rule of Reshape: the target is an operand from opset 5 on; 0 copies a dimension, -1 is inferred."""
    value = call.input(0)
    if call.version < 5:
        target: list[Element] = [number(int(size)) for size in call.attribute("shape", [])]
    else:
        target = call.sizes(1)
    dims = _target_dims(call, dims_of(value), target)
    return [arranged(value, dims)]


def _target_dims(call: Call, dims: Dims, target: Sequence[Element]) -> list[Expression]:
    """Return the dimensions of the result; an unknown one is a new symbol."""
    sizes: list[Expression] = []
    inferred: int | None = None
    for axis, element in enumerate(target):
        size = _size(call, element)
        if size == _MINUS_ONE:
            if inferred is not None:
                raise Dependent("its target has two sizes of -1")
            inferred, size = axis, ONE
        elif size == ZERO and not call.flag("allowzero"):
            size = dims[axis]
        sizes.append(size)
    if inferred is not None:
        sizes[inferred] = _remaining(call, dims, sizes)
    return sizes


def _remaining(call: Call, dims: Sequence[Expression], others: Sequence[Expression]) -> Expression:
    """Return the inferred size: the product of `dims` divided by the product of `others`."""
    top, bottom = list(dims), []
    for size in others:
        if size in top:
            top.remove(size)
        else:
            bottom.append(size)
    whole, divisor = product(top), product(bottom)
    exact = whole.over(divisor)
    if exact is not None:
        return exact
    without_rows = whole.over(ROWS)
    if without_rows is not None and divisor.over(ROWS) is not None:
        whole, divisor = without_rows, divisor.over(ROWS) or ONE
    return call.symbols.derived("remaining", whole, divisor)


def arranged(value: Value, dims: Sequence[Expression]) -> Value:
    """Return the value with the same elements in other dimensions. Raises Dependent if no axis then holds the rows.

    The number of elements before a row must stay the same, or the number after it: as the number of all elements does,
    the other one then stays the same, too.
    """
    if value.rows is None:
        return free(dims)
    axis = next((axis for axis, size in enumerate(dims) if size.counted), None)
    if axis is not None:
        shape, rows = dims_of(value), value.rows
        before, after = product(shape[: rows.axis]) * rows.outer, product(shape[rows.axis + 1 :]) * rows.inner
        outer, inner = before.over(product(dims[:axis])), after.over(product(dims[axis + 1 :]))
        pairs = [(outer, outer and dims[axis].over(ROWS * outer)), (inner and dims[axis].over(ROWS * inner), inner)]
        for first, last in pairs:
            if first is not None and last is not None and not first.counted and not last.counted:
                return rowed(dims, Rows(axis, first, last))
    reason = "rows do not stay on one axis of the new shape"
    if not any(size.counted for size in dims):
        reason = "the new shape is the same for any number of rows"
    raise Dependent(reason)


def flatten(call: Call) -> list[Value]:
    value = call.input(0)
    dims = dims_of(value)
    axis = int(call.attribute("axis", 1))
    axis = axis + len(dims) if axis < 0 else axis
    return [arranged(value, [product(dims[:axis]), product(dims[axis:])])]


def transpose(call: Call) -> list[Value]:
    value = call.input(0)
    dims = dims_of(value)
    perm = [int(axis) for axis in call.attribute("perm", range(len(dims))[::-1])]
    if sorted(perm) != list(range(len(dims))):
        raise Dependent("its permutation does not fit its input")
    return [moved(value, perm)]


def moved(value: Value, perm: Sequence[int]) -> Value:
    """Return the value with its axes in the order of `perm`."""
    dims = [dims_of(value)[axis] for axis in perm]
    if value.rows is None:
        return free(dims)
    return rowed(dims, value.rows.moved(list(perm).index(value.rows.axis)))


def concat(call: Call) -> list[Value]:
    """Rule of Concat: along the axis of the rows, blocks of rows follow each other; along others, rows stay."""
    values = [call.input(index) for index in range(len(call.inputs))]
    shapes = [dims_of(value) for value in values]
    axis = call.axis(len(shapes[0]), 1 if call.version < 4 else 0)
    first = next((value.rows for value in values if value.rows is not None), None)
    dims = list(shapes[0])
    for other in shapes[1:]:
        dims = [broadcast(call.symbols, a, b) for a, b in zip(dims, other, strict=True)]
    dims[axis] = ZERO
    for shape in shapes:
        dims[axis] = call.symbols.bounded(dims[axis] + shape[axis])
    if first is None:
        return [free(dims)]
    outer = ZERO if first.axis == axis else first.outer
    for value in values:
        if value.rows is None:
            raise Dependent("one of its inputs does not have a row for each row of the others")
        if (value.rows.axis, value.rows.inner) != (first.axis, first.inner):
            raise Dependent("rows are laid out differently in its inputs")
        if first.axis == axis:
            outer = outer + value.rows.outer
        elif value.rows.outer != first.outer:
            raise Dependent("rows are laid out differently in its inputs")
    rows = first._replace(outer=outer)
    dims[first.axis] = rows.size
    return [rowed(dims, rows)]


def split(call: Call) -> list[Value]:
    call.only_rowed(0)
    value = call.input(0)
    dims = dims_of(value)
    axis = call.axis(len(dims), 0)
    check_axis(value, axis)
    parts = []
    lengths = _lengths(call, dims[axis].constant)
    for index in range(call.outputs):
        shape = list(dims)
        shape[axis] = lengths[index] if index < len(lengths) else call.symbols.fresh()
        parts.append(free(shape) if value.rows is None else rowed(shape, value.rows))
    return parts


def _lengths(call: Call, whole: int | None) -> list[Expression]:
    lengths = call.optional(1)
    if lengths is not None and lengths.content is not None:
        return [size if isinstance(size, Expression) else call.symbols.fresh() for size in lengths.content.flat]
    equal = int(call.attribute("num_outputs", 0))  # opset 18: the last part may be smaller
    if whole is not None and equal > 0 and lengths is None:
        part = -(-whole // equal)
        return [number(min(part, whole - at * part)) for at in range(equal) if at * part < whole]
    return [number(int(size)) for size in call.attribute("split", [])]


def squeeze(call: Call) -> list[Value]:
    value = call.input(0)
    axes = call.integers(1, "axes")
    rank = len(dims_of(value))
    if axes:  # ONNX Runtime takes an empty list of axes as none
        return [without_axes(value, {normalized(axis, rank) for axis in axes}, keep=False)]
    if value.rows is not None:
        raise Dependent("without axes it drops the axis of the rows when there is one row")
    if any(size.constant is None for size in dims_of(value)):
        return [free()]
    return [free([size for size in dims_of(value) if size != ONE])]


def unsqueeze(call: Call) -> list[Value]:
    value = call.input(0)
    axes = call.integers(1, "axes")
    if axes is None:
        raise Dependent("it has no axes")
    rank = len(dims_of(value)) + len(axes)
    added = {normalized(axis, rank) for axis in axes}
    if len(added) != len(axes):
        raise Dependent("it has an axis twice")
    kept = [axis for axis in range(rank) if axis not in added]
    dims = [ONE] * rank
    for axis, size in zip(kept, dims_of(value), strict=True):
        dims[axis] = size
    return [free(dims) if value.rows is None else rowed(dims, value.rows.moved(kept[value.rows.axis]))]


def expand(call: Call) -> list[Value]:
    """Rule of Expand: broadcasts with a shape. A value without rows gets rows where the shape contains their number."""
    value = call.input(0)
    target = [_size(call, element) for element in call.sizes(1)]
    dims = list(dims_of(value))
    rank = max(len(dims), len(target))
    dims = [ONE] * (rank - len(dims)) + dims
    target = [ONE] * (rank - len(target)) + target
    rows = value.rows.moved(value.rows.axis + rank - len(dims_of(value))) if value.rows is not None else None
    result = []
    for axis, (size, target_size) in enumerate(zip(dims, target, strict=True)):
        if rows is not None and axis == rows.axis:
            if target_size not in (ONE, size):
                raise Dependent("its shape has another size for the axis of the rows")
        elif target_size.counted:
            rows = _repeated(rows, axis, size, target_size)
            size = target_size
        else:
            size = broadcast(call.symbols, size, target_size)
        result.append(size)
    return [free(result) if rows is None else rowed(result, rows)]


def _repeated(rows: Rows | None, axis: int, size: Expression, target_size: Expression) -> Rows:
    inner = target_size.over(ROWS)
    if rows is not None or size != ONE or inner is None or inner.counted:
        raise Dependent("another axis gets a size that depends on the number of rows")
    return Rows(axis, ONE, inner)


def _size(call: Call, element: Element) -> Expression:
    if isinstance(element, Expression):
        return element
    return call.symbols.fresh(counted=depends_on_count(element))


def tile(call: Call) -> list[Value]:
    """Rule of Tile: a value without rows gets rows where an axis of size 1 is repeated once for each row."""
    if call.version < 6:
        raise Dependent("its form of opset 5 and before is not supported")
    value = call.input(0)
    dims = list(dims_of(value))
    repeats = [_size(call, element) for element in call.sizes(1)]
    rows = value.rows
    for axis, (size, times) in enumerate(zip(dims, repeats, strict=True)):
        if rows is not None and axis == rows.axis:
            rows = rows._replace(outer=rows.outer * times)
            dims[axis] = rows.size
        elif times.counted:
            rows = _repeated(rows, axis, size, times)
            dims[axis] = times
        else:
            dims[axis] = call.symbols.bounded(size * times)
    return [free(dims) if rows is None else rowed(dims, rows)]


def shape(call: Call) -> list[Value]:
    """Rule of Shape: the dimensions from `start` to `end` (opset 15)."""
    value = call.input(0)
    dims = dims_of(value)
    content = [call.symbols.bounded(size) for size in dims]
    end = call.attribute("end", len(dims))
    return [known(contents(content[int(call.attribute("start", 0)) : int(end)]))]


def size(call: Call) -> list[Value]:
    return [known(contents([call.symbols.bounded(product(dims_of(call.input(0))))]).reshape(()))]


def constant_of_shape(call: Call) -> list[Value]:
    """Rule of ConstantOfShape: an axis whose size is the number of rows holds the rows, all with the same values."""
    dims = [_size(call, element) for element in call.sizes(0)]
    with_count = [axis for axis, extent in enumerate(dims) if extent.counted]
    if not with_count:
        return [free(dims)]
    inner = dims[with_count[0]].over(ROWS)
    if len(with_count) > 1 or inner is None:
        raise Dependent("several axes have sizes that depend on the number of rows")
    return [rowed(dims, Rows(with_count[0], ONE, inner))]


def diagonal(call: Call) -> list[Value]:
    """Rule of Trilu, which works on the last two axes."""
    call.only_rowed(0)
    value = call.input(0)
    rank = len(dims_of(value))
    for axis in (rank - 2, rank - 1):
        check_axis(value, axis)
    return [Value(value.dims, value.rows)]


def counting(call: Call) -> list[Value]:
    """Rule of Range: the result has an unknown number of elements."""
    call.only_rowed()
    for index in range(3):
        constant_or_free(call.input(index))
    return [free(unknown_dims(call, 1))]


def constant_or_free(value: Value) -> None:
    """Raise Dependent if the value depends on the number of rows."""
    if value.counted:
        raise Dependent("it counts up to the number of rows")


RULES: Rules = {
    "Concat": Rule(concat),
    "ConstantOfShape": Rule(constant_of_shape, frozenset({0})),
    "Expand": Rule(expand, frozenset({1})),
    "Flatten": Rule(flatten),
    "Range": Rule(counting),
    "Reshape": Rule(reshape, frozenset({1})),
    "Shape": Rule(shape, frozenset({0})),
    "Size": Rule(size, frozenset({0})),
    "Split": Rule(split),
    "Squeeze": Rule(squeeze),
    "Tile": Rule(tile, frozenset({1})),
    "Transpose": Rule(transpose),
    "Trilu": Rule(diagonal),
    "Unsqueeze": Rule(unsqueeze),
}
