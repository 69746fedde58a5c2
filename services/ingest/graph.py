"""An ONNX file as its protobuf, and walks over everything in it, subgraphs and functions included.

Imported by the checker process only. Source: onnx.proto (IR specification, "Graphs", "Functions").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from millstream.services.errors import invalid

PROTOBUF_BYTES_MAX = 2**31 - 1
_IR_DEFAULTS = 4  # the version from which on an initializer is an input's default


def read_model(path: Path) -> onnx.ModelProto:
    """The model at `path`, without its external data. Raises Failure(INVALID)."""
    if path.stat().st_size > PROTOBUF_BYTES_MAX:
        raise invalid("an ONNX file cannot be larger than 2 GiB: save it with external data and upload a zip or tar")
    try:
        model = onnx.load_model(path, load_external_data=False)
    except DecodeError:
        raise invalid("this is not an ONNX model, or it was cut short: it cannot be parsed") from None
    if not model.HasField("graph") or not model.ir_version or not model.graph.output:
        raise invalid("this is not an ONNX model: it has no graph with outputs")
    return model


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node that may run: of the graph, the functions, and all graphs in attributes of these."""
    yield from model.graph.node
    for function in model.functions:
        yield from function.node
    for attribute in _attributes(model, training=False):
        for graph in (attribute.g, *attribute.graphs):
            yield from graph.node


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that is stored in the model, in whatever place."""
    yield from _initializers(model.graph)
    for training in model.training_info:
        for graph in (training.initialization, training.algorithm):
            yield from _initializers(graph)
    for attribute in _attributes(model, training=True):
        yield attribute.t
        yield from attribute.tensors
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _initializers(graph)


def fixed_inputs(graph: onnx.GraphProto) -> set[str]:
    """Names of graph inputs that have a stored value (before IR 4 every initializer was listed as an input)."""
    return {tensor.name for tensor in graph.initializer} | {s.values.name for s in graph.sparse_initializer}


def default_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Inputs whose stored value is a default that a caller may replace (IR 4 on), as far as they are meant as such.

    Some exporters list all weights as inputs. A variable shape is no weight's; a fixed one counts where the graph also
    has weights that are not listed.
    """
    if model.ir_version < _IR_DEFAULTS:
        return []
    stored = fixed_inputs(model.graph)
    listed = {value.name for value in model.graph.input}
    chosen = not stored <= listed
    return [value for value in model.graph.input if value.name in stored and (chosen or _variable(value))]


def _variable(value: onnx.ValueInfoProto) -> bool:
    dims = value.type.tensor_type.shape.dim
    return any(dim.WhichOneof("value") != "dim_value" for dim in dims)


def _attributes(model: onnx.ModelProto, *, training: bool) -> Iterator[onnx.AttributeProto]:
    """Every attribute of nodes and functions, where it is their default, at whatever depth."""
    waiting: list[Iterable[onnx.AttributeProto]] = [function.attribute_proto for function in model.functions]
    roots = [model.graph.node, *(function.node for function in model.functions)]
    if training:
        for info in model.training_info:
            roots += [info.initialization.node, info.algorithm.node]
    waiting += [node.attribute for root in roots for node in root]
    while waiting:
        for attribute in waiting.pop():
            yield attribute
            waiting += [node.attribute for graph in (attribute.g, *attribute.graphs) for node in graph.node]


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
