"""Which values of an integer input are indices of a table in the model: token ids, categories, types.

input ─> Cast, Reshape, … (all elements are kept) ─> indices of Gather ─> rows of the table ─> range

An index outside of the table fails the whole run on a CPU, and reads anything on some other devices. Operators within
subgraphs and functions are left out: they may not run. Imported by the checker process only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from onnx import TensorProto

from millstream.services.model.signature import TensorSpec

IndexRange = tuple[int, int]

_INTEGERS = frozenset({"INT32", "INT64"})
_KEEP_ALL = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"})
_KEEP_DIMS = frozenset({"Cast", "Identity", "DequantizeLinear"})  # of their first operand
_GATHERS = frozenset({("", "Gather"), ("ai.onnx", "Gather"), ("com.microsoft", "GatherBlockQuantized")})
#: operators with several lookups in one -> (indices, table), positions of operands
_EMBEDDINGS = {
    ("com.microsoft", "EmbedLayerNormalization"): ((0, 2), (1, 4)),
    ("com.microsoft", "QEmbedLayerNormalization"): ((0, 2), (1, 4)),
}


def index_ranges(model: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> dict[str, IndexRange]:
    """Return the least and the greatest index that each input may hold; inputs that are no indices are left out.

    A negative index counts from the end, as in ONNX. In a table of rows, an embedding, it is refused: frameworks refuse
    it, and the last row of a vocabulary is no answer to -1.
    """
    tables: dict[str, Sequence[int]] = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for spec in inputs:
        tables.pop(spec.name, None)  # a default that a request may replace
    sources = {spec.name: spec.name for spec in inputs if spec.datatype in _INTEGERS}
    found: dict[str, IndexRange] = {}
    for node in model.graph.node:
        first = node.input[0] if node.input else ""
        if node.op_type == "Constant":
            tables |= {name: one.t.dims for one in node.attribute for name in node.output if one.name == "value"}
        if node.op_type in _KEEP_DIMS and first in tables:
            tables[node.output[0]] = tables[first]
        if _keeps_all(node) and first in sources:
            sources[node.output[0]] = sources[first]
        for indices, table, axis in _lookups(node):
            if indices not in sources or table not in tables:
                continue
            dims = tables[table]
            if -len(dims) <= axis < len(dims):
                name, size = sources[indices], dims[axis]
                low, high = found.get(name, (-size, size - 1))
                found[name] = (max(low, 0 if len(dims) > 1 else -size), min(high, size - 1))
    return {name: one for name, one in found.items() if one[0] <= one[1]}


def _keeps_all(node: onnx.NodeProto) -> bool:
    """Whether the output has all elements of the first operand, unchanged."""
    if node.op_type == "Cast":
        return all(one.i in {TensorProto.INT32, TensorProto.INT64} for one in node.attribute if one.name == "to")
    return node.op_type in _KEEP_ALL


def _lookups(node: onnx.NodeProto) -> Iterator[tuple[str, str, int]]:
    """Yield the names of indices and table, and the axis, of each lookup that a node does."""
    kind = (node.domain, node.op_type)
    if kind in _GATHERS:
        pairs: tuple[tuple[int, int], ...] = ((1, 0),)
        axis = next((one.i for one in node.attribute if one.name in {"axis", "gather_axis"}), 0)
    else:
        pairs, axis = _EMBEDDINGS.get(kind, ()), 0
    for indices, table in pairs:
        if max(indices, table) < len(node.input):
            yield node.input[indices], node.input[table], axis
