"""Rewrites models so that requests can share runs: batches fixed at 1, and sizes of inputs that must be equal.

Exporters write the size of their example's batch into the graph. The analysis of rows follows them until an operator
has such a size, and goes on behind its replacement:

Reshape to a constant shape            ─> -1 on the axis that then holds the rows
Concat and states of LSTM, GRU and RNN ─> operands without rows repeated for each row
Resize to constant sizes               ─> the number of rows in their place
GatherND at row 0, GatherElements      ─> within each row, and in a table repeated for each row
Dimensions of one name in two inputs    ─> a Reshape of the one to the size of the other
The caller proves the rewrite, and compares its outputs with the original's. Imported by the checker process only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import onnx
from onnx import helper, numpy_helper

from millstream.plugins.proof.analysis import changed_nodes, prove
from millstream.plugins.proof.expression import ONE, ROWS, Expression, number, product
from millstream.plugins.proof.node import dims_of
from millstream.plugins.proof.rules.layout import arranged
from millstream.plugins.proof.value import AnyValue, Dependent, Mixed, Rows, Value

_RECURRENT = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
_RESIZED = 3
_ALLOWZERO_OPSET = 14
#: larger models, without their weight files, are not copied once more to try a proof
_COPIED_BYTES_MAX = 1 << 29
_PREFIX = "millstream_rows"


def with_variable_rows(model: onnx.ModelProto, folder: Path = Path()) -> onnx.ModelProto:
    """Return a copy of `model` with a variable first dimension in every input and output.

    `folder`: that of its weight files.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    stored = _stored(graph)
    symbol = _unused_symbol(graph)
    inputs = [value for value in graph.input if value.name not in stored]
    for value in (*inputs, *graph.output):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = symbol
    del graph.value_info[:]  # shapes of inner values, inferred for a batch of 1
    names = [value.name for value in inputs]
    if names:
        nodes = [_copied(node) for node in changed_nodes(copy, names, _Changes(names[0], graph, folder))]
        del graph.node[:]
        graph.node.extend(nodes)
    return copy


class _Changes:
    """Makes the replacements of nodes. Names begin with _PREFIX.

    Args:
        counted: an input, whose first dimension is the number of rows.
        graph: the model's, which has stored positions.
        folder: that of its weight files.
    """

    def __init__(self, counted: str, graph: onnx.GraphProto, folder: Path) -> None:
        self._counted = counted
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._folder = folder
        self._made = 0

    def __call__(self, node: onnx.NodeProto, operands: Sequence[AnyValue | None]) -> list[onnx.NodeProto]:
        values = [None if isinstance(value, Mixed) else value for value in operands]
        with suppress(Dependent):
            if node.op_type == "Reshape" and len(values) == 2:
                return self._reshape(node, values[0], values[1])
            rows = next((value.rows for value in values if value is not None and value.rows is not None), None)
            if rows is None or (rows.outer, rows.inner) != (ONE, ONE):
                return []
            if node.op_type == "Concat":
                return self._repeat(node, dict.fromkeys(range(len(values)), rows.axis), values)
            if node.op_type == "GatherElements":
                return self._repeat(node, {0: rows.axis}, values)
            if node.op_type == "GatherND":
                return self._gather(node, values)
            if node.op_type in _RECURRENT:
                return self._repeat(node, dict.fromkeys(_RECURRENT[node.op_type], rows.axis), values)
            if node.op_type == "Resize" and len(values) > _RESIZED:
                return self._resize(node, values, rows.axis)
        return []

    def _reshape(self, node: onnx.NodeProto, value: Value | None, target: Value | None) -> list[onnx.NodeProto]:
        sizes = _constants(target)
        zero_is_empty = any(attribute.name == "allowzero" and attribute.i for attribute in node.attribute)
        if sizes is None or (zero_is_empty and 0 in sizes):
            return []
        shape = _guess(sizes) if value is None or value.rows is None else _with_rows(value, sizes)
        if shape is None:
            return []
        constant = self._constant(shape)
        kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
        changed = helper.make_node("Reshape", [node.input[0], constant.output[0]], node.output, name=node.name)
        changed.attribute.extend(kept)
        return [constant, changed]

    def _repeat(
        self, node: onnx.NodeProto, axes: dict[int, int], values: Sequence[Value | None]
    ) -> list[onnx.NodeProto]:
        """Repeat each operand of `axes` that has no rows, and size 1 on its axis, for each row along this axis."""
        made: list[onnx.NodeProto] = []
        changed = _copied(node)
        for at, axis in axes.items():
            value = values[at] if at < len(values) else None
            if value is not None and value.rows is None and dims_of(value)[axis] == ONE:
                made += self._sizes([1] * axis, [1] * (len(dims_of(value)) - axis - 1))
                name = self._name()
                made.append(helper.make_node("Expand", [node.input[at], made[-1].output[0]], [name]))
                changed.input[at] = name
        return [*made, changed] if made else []

    def _resize(self, node: onnx.NodeProto, values: Sequence[Value | None], axis: int) -> list[onnx.NodeProto]:
        sizes = _constants(values[_RESIZED])
        if sizes is None or len(sizes) != len(dims_of(values[0] or Value(None))) or sizes[axis] != 1:
            return []
        made = self._sizes(sizes[:axis], sizes[axis + 1 :])
        changed = _copied(node)
        changed.input[_RESIZED] = made[-1].output[0]
        return [*made, changed]

    def _gather(self, node: onnx.NodeProto, values: Sequence[Value | None]) -> list[onnx.NodeProto]:
        """Look stored positions, which begin with row 0, up in each row."""
        data, positions = values[0], values[1]
        if data is None or data.rows != Rows(0) or positions is None or positions.rows is not None:
            return []
        dims, depth = dims_of(positions), dims_of(positions)[-1].constant or 0
        tensor = self._stored.get(node.input[1])
        batched = any(attribute.name == "batch_dims" and attribute.i for attribute in node.attribute)
        if batched or dims[0] != ONE or depth < 2 or tensor is None or not self._begins_with_zeros(tensor):
            return []
        start, end, axis = self._constant([1]), self._constant([depth]), self._constant([len(dims) - 1])
        names = [node.input[1], *(one.output[0] for one in (start, end, axis))]
        rest = helper.make_node("Slice", names, [self._name()])
        sizes = self._sizes([], [1] * (len(dims) - 1))
        repeated = helper.make_node("Expand", [rest.output[0], sizes[-1].output[0]], [self._name()])
        within = [node.input[0], repeated.output[0]]
        changed = helper.make_node("GatherND", within, node.output, name=node.name, batch_dims=1)
        return [start, end, axis, rest, *sizes, repeated, changed]

    def reshaped(self, name: str, sizes: Sequence[tuple[str, int]]) -> list[onnx.NodeProto]:
        """Return nodes, the last of which reshapes `name` to sizes, each of an axis of an input."""
        made: list[onnx.NodeProto] = []
        parts = []
        for source, axis in sizes:
            place = self._constant([axis])
            shape = helper.make_node("Shape", [source], [self._name()])
            size = helper.make_node("Gather", [shape.output[0], place.output[0]], [self._name()], axis=0)
            made += [place, shape, size]
            parts.append(size.output[0])
        target = helper.make_node("Concat", parts, [self._name()], axis=0)
        others = " and ".join(dict.fromkeys(repr(source[:80]) for source, _ in sizes if source != name))
        why = f"{name[:80]!r} must have the sizes of {others} in dimensions of the same name"  # errors of a run show it
        equal = helper.make_node("Reshape", [name, target.output[0]], [self._name()], name=why, allowzero=1)
        return [*made, target, equal]

    def _begins_with_zeros(self, tensor: onnx.TensorProto) -> bool:
        try:
            return not numpy_helper.to_array(tensor, str(self._folder))[..., 0].any()
        except Exception:  # what is stored is damaged, and may be anything
            return False

    def _sizes(self, before: list[int], after: list[int]) -> list[onnx.NodeProto]:
        """Return nodes, the last of which computes a shape with the number of rows between constants."""
        parts = [self._constant(before), self._constant(after)]
        zero = self._constant([0])
        shape = helper.make_node("Shape", [self._counted], [self._name()])
        rows = helper.make_node("Gather", [shape.output[0], zero.output[0]], [self._name()], axis=0)
        names = [parts[0].output[0], rows.output[0], parts[1].output[0]]
        return [*parts, zero, shape, rows, helper.make_node("Concat", names, [self._name()], axis=0)]

    def _constant(self, integers: Sequence[int]) -> onnx.NodeProto:
        """Return a Constant node: before IR 4 an initializer would also have to be listed as an input."""
        tensor = helper.make_tensor("", onnx.TensorProto.INT64, [len(integers)], integers)
        return helper.make_node("Constant", [], [self._name()], value=tensor)

    def _name(self) -> str:
        self._made += 1
        return f"{_PREFIX}_{self._made}"


def _constants(value: Value | None) -> list[int] | None:
    if value is None or value.content is None or value.rank != 1:
        return None
    elements = [element.constant if isinstance(element, Expression) else None for element in value.content]
    sizes = [size for size in elements if size is not None]
    return sizes if len(sizes) == len(elements) else None


def _guess(sizes: list[int]) -> list[int] | None:
    """Return the shape for a value of which it is not known where its rows are: on the first axis, if that is 1."""
    return [0 if -1 in sizes else -1, *sizes[1:]] if sizes and sizes[0] == 1 else None


def _with_rows(value: Value, sizes: list[int]) -> list[int] | None:
    """Return `sizes`, which hold one row, with 0 (as in the input) or -1 on the axis that then holds all rows, or None.

    Several axes may fit. Features stay on the last axis; then the rows stay apart from what is before them, from what
    is behind them, and on their axis.
    """
    dims, rows = dims_of(value), value.rows
    assert rows is not None
    whole = [dims[at] if size == 0 else number(size) for at, size in enumerate(sizes)]
    one_row = product(dims).over(ROWS)
    if -1 in sizes and one_row is not None:
        at = sizes.index(-1)
        rest = one_row.over(product(size for place, size in enumerate(whole) if place != at))
        if rest is not None and rest.constant is not None:
            whole[at], sizes = rest, [*sizes[:at], rest.constant, *sizes[at + 1 :]]
    found: list[tuple[tuple[bool, bool, bool, bool, int], list[int]]] = []
    for axis, size in enumerate(sizes):
        kept = axis == rows.axis and size == 1 and rows == Rows(axis)
        if size < 1 or (-1 in sizes and not kept):
            continue
        with suppress(Dependent):
            placed = arranged(value, [*whole[:axis], number(size) * ROWS, *whole[axis + 1 :]]).rows or rows
            order = (axis == len(sizes) - 1, placed.outer != ONE, placed.inner != ONE, axis != rows.axis, axis)
            found.append((order, [*sizes[:axis], 0 if kept else -1, *sizes[axis + 1 :]]))
    return min(found)[1] if found else None


def _copied(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _unused_symbol(graph: onnx.GraphProto) -> str:
    values: Iterable[onnx.ValueInfoProto] = (*graph.input, *graph.output)
    used = {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim}
    symbol = "rows"
    while symbol in used:
        symbol += "_"
    return symbol


def with_equal_sizes(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return a copy that fails for inputs whose dimensions of one name differ; None if it has none, is large, or old.

    A graph may take a length from one input and apply it to another. A Reshape to the same shape makes sure that both
    are equal, and lets the analysis see it.
    """
    opset = max((one.version for one in model.opset_import if one.domain in {"", "ai.onnx"}), default=0)
    if opset < _ALLOWZERO_OPSET or model.ByteSize() > _COPIED_BYTES_MAX:
        return None
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    stored = _stored(graph)
    first: dict[str, tuple[str, int]] = {}
    guards: list[onnx.NodeProto] = []
    changes = _Changes("", graph, Path())
    for value in [value for value in graph.input if value.name not in stored]:
        names = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
        shared = {axis: first[name] for axis, name in enumerate(names) if axis and name in first}
        first |= {name: (value.name, axis) for axis, name in enumerate(names) if axis and name not in first and name}
        if shared:
            guards += changes.reshaped(value.name, [shared.get(axis, (value.name, axis)) for axis in range(len(names))])
            _rename(graph.node, value.name, guards[-1].output[0])
    for at, node in enumerate(guards):
        graph.node.insert(at, node)
    return copy if guards else None


def _rename(nodes: Iterable[onnx.NodeProto], old: str, new: str) -> None:
    """Let nodes, and those of graphs inside, read `new` in place of `old`."""
    for node in nodes:
        for at, name in enumerate(node.input):
            if name == old:
                node.input[at] = new
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _rename(graph.node, old, new)


def _stored(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all stored values: before IR 4 every initializer was also listed as an input."""
    return {tensor.name for tensor in graph.initializer} | {one.values.name for one in graph.sparse_initializer}


class _Prover:
    """What this plug-in adds to the check of a model (services/ingest/proof.Prover)."""

    prove = staticmethod(prove)
    with_variable_rows = staticmethod(with_variable_rows)
    with_equal_sizes = staticmethod(with_equal_sizes)


PROVER = _Prover()
