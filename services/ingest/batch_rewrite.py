"""Rewrites a model whose batch size is fixed at 1 to accept any number of rows.

The rewrite is a guess: the caller runs the original and the rewrite and compares their outputs.
Imported by the checker process only. Source: ONNX operator Reshape: 0 copies the input's dimension, -1 is inferred.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import helper, numpy_helper

from millstream.services.ingest.graph import fixed_inputs

#: values that may replace a leading 1 in the target shape of a Reshape, most likely first
LEADING = (0, -1)

#: operators whose output describes a tensor and does not contain its rows
_DESCRIBING = frozenset({"Shape", "Size"})


def with_variable_rows(model: onnx.ModelProto, leading: int) -> onnx.ModelProto:
    """Return a copy of `model` with a variable first dimension in every input and output.

    Where a Reshape of data from an input has a constant target shape that begins with 1, `leading` replaces the 1.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    stored = fixed_inputs(graph)
    symbol = _unused_symbol(graph)
    for value in (*graph.input, *graph.output):
        if value.name not in stored and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = symbol
    del graph.value_info[:]  # shapes of inner values, inferred for a batch of 1
    _reshape_rows(graph, leading)
    return copy


def _reshape_rows(graph: onnx.GraphProto, leading: int) -> None:
    shapes = _constants(graph)
    dependent = _dependent(graph)
    rewritten: list[onnx.NodeProto] = []
    for position, node in enumerate(graph.node):
        if node.op_type == "Reshape" and len(node.input) == 2 and node.input[0] in dependent:
            target = _target(shapes.get(node.input[1]), node, leading)
            if target is not None:
                name = f"millstream_rows_shape_{position}"
                tensor = helper.make_tensor(name, onnx.TensorProto.INT64, [len(target)], target)
                # A Constant node, since before IR 4 an initializer would also have to be listed as an input.
                rewritten.append(helper.make_node("Constant", [], [name], value=tensor))
                node.input[1] = name
        rewritten.append(node)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in rewritten]
    del graph.node[:]
    graph.node.extend(nodes)


def _target(shape: onnx.TensorProto | None, node: onnx.NodeProto, leading: int) -> list[int] | None:
    if shape is None:
        return None
    dims = [int(dim) for dim in numpy_helper.to_array(shape).ravel()]
    if not dims or dims[0] != 1:
        return None
    zero_is_empty = any(attribute.name == "allowzero" and attribute.i for attribute in node.attribute)
    inferred = -1 in dims
    if inferred and zero_is_empty:
        return None
    first = -1 if zero_is_empty or (leading == -1 and not inferred) else 0
    return [first, *dims[1:]]


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the INT64 vectors stored in the graph's initializers and Constant nodes, by name."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update((node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value")
    return {name: tensor for name, tensor in constants.items() if _is_shape(tensor)}


def _is_shape(tensor: onnx.TensorProto) -> bool:
    stored_here = tensor.data_location != onnx.TensorProto.EXTERNAL
    return stored_here and tensor.data_type == onnx.TensorProto.INT64 and len(tensor.dims) == 1


def _dependent(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the inputs and of all values computed from them. Nodes are in topological order."""
    dependent = {value.name for value in graph.input} - fixed_inputs(graph)
    for node in graph.node:
        if node.op_type not in _DESCRIBING and dependent.intersection(node.input):
            dependent.update(node.output)
    return dependent


def _unused_symbol(graph: onnx.GraphProto) -> str:
    values: Iterable[onnx.ValueInfoProto] = (*graph.input, *graph.output)
    used = {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim}
    symbol = "rows"
    while symbol in used:
        symbol += "_"
    return symbol
