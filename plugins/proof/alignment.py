"""Combines tensors with labelled axes, as in Einstein summation.

Elements with equal labels are combined. Rows stay independent if all operands with rows have them under the same
label, the output keeps this label, and all other operands have size 1 (broadcast) along it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from millstream.plugins.proof.expression import ONE, Expression, Symbols
from millstream.plugins.proof.node import dims_of
from millstream.plugins.proof.value import Dependent, Rows, Value, free, rowed

Labels = Sequence[Hashable]


def combine(symbols: Symbols, operands: Sequence[tuple[Value, Labels]], output: Labels) -> Value:
    """Return the result, with the axes `output`, of combining operands that have one label per axis.

    Labels that are missing in `output` are summed over. Raises Dependent.
    """
    label, rows = _row_label([(value, labels) for value, labels in operands if value.rows is not None])
    sizes: dict[Hashable, Expression] = {}
    for value, labels in operands:
        for axis, (name, size) in enumerate(zip(labels, dims_of(value), strict=True)):
            if name == label and size != ONE and (value.rows is None or value.rows.axis != axis):
                raise Dependent("rows are combined with an axis that has no rows")
            sizes[name] = broadcast(symbols, sizes[name], size) if name in sizes else size
    return _output(sizes, output, label, rows)


def _row_label(operands: Sequence[tuple[Value, Labels]]) -> tuple[Hashable, Rows | None]:
    label: Hashable = None
    rows: Rows | None = None
    for value, labels in operands:
        assert value.rows is not None
        name = labels[value.rows.axis]
        if rows is None:
            label, rows = name, value.rows
        elif name != label:
            raise Dependent("rows of one input are combined with another axis of the other")
        elif (rows.outer, rows.inner) != (value.rows.outer, value.rows.inner):
            raise Dependent("rows are laid out differently in two inputs")
    return label, rows


def _output(sizes: Mapping[Hashable, Expression], output: Labels, label: Hashable, rows: Rows | None) -> Value:
    dims = [sizes[name] for name in output]
    if rows is None:
        return free(dims)
    if label not in output:
        raise Dependent("it combines all rows")
    axis = list(output).index(label)
    dims[axis] = rows.size
    return rowed(dims, rows.moved(axis))


def elementwise(symbols: Symbols, operands: Sequence[Value]) -> Value:
    """Return the result of multidirectional broadcasting: axes are aligned from the last one."""
    if all(value.rows is None for value in operands) and any(value.dims is None for value in operands):
        return free()
    ranks = [len(dims_of(value)) for value in operands]
    labelled = [(value, range(-rank, 0)) for value, rank in zip(operands, ranks, strict=True)]
    return combine(symbols, labelled, range(-max(ranks), 0))


def broadcast(symbols: Symbols, left: Expression, right: Expression) -> Expression:
    """Return the size of an axis after broadcasting two sizes."""
    if right in {left, ONE}:
        return left
    if left == ONE:
        return right
    if right.constant is not None:
        return right
    if left.constant is not None:
        return left
    return symbols.derived("broadcast", left, right)
