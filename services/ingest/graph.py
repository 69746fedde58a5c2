"""Reads an ONNX file into its protobuf and iterates over its nodes and tensors, subgraphs and functions included.

Imported by the checker process only. Source: onnx.proto (IR specification, "Graphs", "Functions").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from millstream.services.errors import invalid
from millstream.services.ingest.external_data import link_files
from millstream.services.model.names import FILE
from millstream.services.model.onnx_file import ExternalTensor

PROTOBUF_BYTES_MAX = 2**31 - 1
IR_DEFAULTS = 4  # from this IR version on, an initializer of an input is its default value


def read_model(path: Path) -> onnx.ModelProto:
    """Return the model at `path` without its external data. Raises Failure(INVALID)."""
    if path.stat().st_size > PROTOBUF_BYTES_MAX:
        raise invalid("an ONNX file cannot be larger than 2 GiB: save it with external data and upload a zip or tar")
    try:
        model = onnx.load_model(path, load_external_data=False)
    except DecodeError:
        why = "this is not an ONNX model, or it was damaged or cut short: it cannot be parsed"
        raise invalid(f"{why}; copy or download it again") from None
    if not model.HasField("graph") or not model.ir_version or not model.graph.output:
        raise invalid("this is not an ONNX model: it has no graph with outputs")
    return model


def save_model(model: onnx.ModelProto, files: list[str], source: Path, target: Path) -> Path:
    """Write a model to the new folder `target`, with links to its weight `files` in `source`. Returns its path."""
    target.mkdir(parents=True)
    link_files(files, source, target)
    path = target / FILE
    path.write_bytes(model.SerializeToString())
    return path


def declare_shapes(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]]) -> None:
    """Give each input and output without a shape that of its name in `shapes`; a negative dimension is variable."""
    for value in (*graph.input, *graph.output):
        tensor = value.type.tensor_type
        if value.name in shapes and value.type.HasField("tensor_type") and not tensor.HasField("shape"):
            tensor.shape.SetInParent()
            for size in shapes[value.name]:
                dim = tensor.shape.dim.add()
                if size >= 0:
                    dim.dim_value = size


def declare_channels(graph: onnx.GraphProto) -> None:
    """Give inputs of convolutions the number of channels that the weights have, where it is declared as variable."""
    inputs = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    weights = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "Conv" or len(node.input) < 2:
            continue
        dims, kernel = inputs.get(node.input[0], ()), weights.get(node.input[1], ())
        groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        if len(dims) == len(kernel) > 2 and dims[1].WhichOneof("value") != "dim_value" and kernel[1] * groups > 0:
            dims[1].dim_value = kernel[1] * groups


def nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node that may run: of the graph, of the functions, and of all graphs in their attributes."""
    yield from model.graph.node
    for function in model.functions:
        yield from function.node
    for attribute in _attributes(model, training=False):
        for graph in (attribute.g, *attribute.graphs):
            yield from graph.node


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor stored in the model: initializers and attributes of all graphs and functions, training too."""
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


def stored_outside(model: onnx.ModelProto) -> Iterator[ExternalTensor]:
    """Yield the tensors that name another file."""
    for tensor in tensors(model):
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if external or tensor.external_data:
            yield ExternalTensor(tensor.name, {one.key: one.value for one in tensor.external_data}, external)


def fixed_inputs(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all stored values (before IR 4 every initializer was also listed as an input)."""
    return {tensor.name for tensor in graph.initializer} | {s.values.name for s in graph.sparse_initializer}


def default_inputs(model: onnx.ModelProto, declared: Collection[str]) -> list[onnx.ValueInfoProto]:
    """Return the inputs whose stored value is a default that a caller may replace (from IR 4 on).

    Those in `declared` are, since the model's configuration says so. For the others the graph has to tell.

    Some exporters list all weights as inputs, and a weight is not a default. A variable shape is never a weight's. An
    input of fixed shape is a default only if the graph has other weights that are not listed as inputs.
    """
    if model.ir_version < IR_DEFAULTS:
        return []
    stored = fixed_inputs(model.graph)
    listed = {value.name for value in model.graph.input}
    has_unlisted_weights = not stored <= listed
    return [
        value
        for value in model.graph.input
        if value.name in stored and (value.name in declared or has_unlisted_weights or _variable(value))
    ]


def _variable(value: onnx.ValueInfoProto) -> bool:
    dims = value.type.tensor_type.shape.dim
    return any(dim.WhichOneof("value") != "dim_value" for dim in dims)


def _attributes(model: onnx.ModelProto, *, training: bool) -> Iterator[onnx.AttributeProto]:
    """Yield every attribute of a node and every default attribute of a function, at any depth of nested graphs."""
    pending: list[Iterable[onnx.AttributeProto]] = [function.attribute_proto for function in model.functions]
    roots = [model.graph.node, *(function.node for function in model.functions)]
    if training:
        for info in model.training_info:
            roots += [info.initialization.node, info.algorithm.node]
    pending += [node.attribute for root in roots for node in root]
    while pending:
        for attribute in pending.pop():
            yield attribute
            pending += [node.attribute for graph in (attribute.g, *attribute.graphs) for node in graph.node]


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
