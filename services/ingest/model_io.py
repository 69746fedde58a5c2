"""Reads the inputs and outputs of a model file and converts them to the tensor specs of a signature.

Also which values of an integer input are indices of a table in the model: token ids, categories, types.
input ─> Cast, Reshape, … (all elements are kept) ─> indices of Gather ─> rows of the table ─> range
An index outside of the table fails the whole run on a CPU, and reads anything on some other devices. Operators within
subgraphs and functions are left out: they may not run.

Imported by the checker process only. Source: onnx.proto, TypeProto and TensorProto.DataType.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import onnx
from onnx import TensorProto

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.graph import default_inputs, fixed_inputs, nodes
from millstream.services.ingest.report import NAME_CHARACTERS_MAX, RANK_MAX, TENSORS_MAX
from millstream.services.model.datatypes import BYTES, ITEM_BYTES
from millstream.services.model.signature import TensorSpec

#: limit on the bytes of one tensor with fixed dimensions: gateways generate such inputs for readiness probes
ROW_BYTES_MAX = 1 << 30

#: names that tf2onnx and paddle2onnx make up, a new one for each variable dimension: equal sizes have different names
_GENERATED = re.compile(r"unk__\d+|DynamicDimension\.\d+", re.ASCII)

Dim = int | str | None
"""A fixed size (int), a named variable size (str), or an unnamed variable size (None)."""

_DATATYPES: dict[int, str] = {
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "UINT8",
    TensorProto.UINT16: "UINT16",
    TensorProto.UINT32: "UINT32",
    TensorProto.UINT64: "UINT64",
    TensorProto.INT8: "INT8",
    TensorProto.INT16: "INT16",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT: "FP32",
    TensorProto.DOUBLE: "FP64",
    TensorProto.STRING: BYTES,
}

_INTEGERS = frozenset({"INT32", "INT64"})
_KEEP_ALL = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"})
_KEEP_DIMS = frozenset({"Cast", "Identity", "DequantizeLinear"})  # of their first operand
_GATHERS = frozenset({("", "Gather"), ("ai.onnx", "Gather"), ("com.microsoft", "GatherBlockQuantized")})
#: operators with several lookups in one -> (indices, table), positions of operands
_EMBEDDINGS = {
    ("com.microsoft", "EmbedLayerNormalization"): ((0, 2), (1, 4)),
    ("com.microsoft", "QEmbedLayerNormalization"): ((0, 2), (1, 4)),
}


class ModelTensor(NamedTuple):
    """An input or output of the model file."""

    name: str
    datatype: str
    dims: tuple[Dim, ...]
    optional: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether its first dimension is variable, so that it can be the rows."""
        return bool(self.dims) and not isinstance(self.dims[0], int)


def read_defaults(model: onnx.ModelProto, declared: Collection[str]) -> list[ModelTensor]:
    """Return the inputs that a caller may omit thanks to a default; types that v2 cannot carry are skipped.

    `declared`: names of inputs that the model's configuration lists.
    """
    defaults: list[ModelTensor] = []
    for value in default_inputs(model, declared):
        with suppress(Failure):
            defaults.append(_tensor(value, "input")._replace(optional=True))
    return defaults


def in_graph_order(model: onnx.ModelProto, tensors: Iterable[ModelTensor]) -> list[ModelTensor]:
    """Return the inputs in the order in which the graph lists them."""
    positions = {value.name: position for position, value in enumerate(model.graph.input)}
    return sorted(tensors, key=lambda tensor: positions[tensor.name])


def read_inputs(model: onnx.ModelProto) -> list[ModelTensor]:
    """Return the inputs without a stored value. Raises Failure(INVALID) for a type or shape that v2 cannot carry."""
    stored = fixed_inputs(model.graph)
    return [_tensor(value, "input") for value in model.graph.input if value.name not in stored]


def is_shapeless(value: onnx.ValueInfoProto) -> bool:
    """Return whether a tensor is declared without a shape."""
    return value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")


def read_tensors(model: onnx.ModelProto) -> tuple[list[ModelTensor], list[ModelTensor]]:
    """Return the model's inputs (those without a stored value) and outputs.

    Raises Failure(INVALID) for a type or shape that the v2 protocol cannot carry.
    """
    zipmaps = {name for node in nodes(model) if node.op_type == "ZipMap" for name in node.output}
    inputs = read_inputs(model)
    outputs = [_tensor(value, "output", zipmaps) for value in model.graph.output]
    check_bounds([*inputs, *outputs])
    texts = [tensor.name for tensor in (*inputs, *outputs) if tensor.datatype == BYTES]
    halves = [tensor.name for tensor in outputs if tensor.datatype == "BF16"]
    if texts and halves:
        raise invalid(f"ONNX Runtime cannot return BF16 ({halves[0]!r}) from a model with text ({texts[0]!r})")
    return inputs, outputs


def check_bounds(tensors: Sequence[ModelTensor]) -> None:
    """Raise Failure(INVALID) if there are too many tensors, or if one is too large or its name too long."""
    if len(tensors) > TENSORS_MAX:
        raise invalid(f"the model has {len(tensors)} inputs and outputs: at most {TENSORS_MAX} can be served")
    for tensor in tensors:
        name = repr(tensor.name[:80])
        if not tensor.name or len(tensor.name) > NAME_CHARACTERS_MAX:
            raise invalid(
                f"tensor {name} has a name of {len(tensor.name)} characters: 1 to {NAME_CHARACTERS_MAX} are allowed"
            )
        if len(tensor.dims) > RANK_MAX:
            raise invalid(f"tensor {name} has {len(tensor.dims)} dimensions: at most {RANK_MAX} can be served")
        item = ITEM_BYTES.get(tensor.datatype, 1)
        if math.prod(dim for dim in tensor.dims if isinstance(dim, int)) * item > ROW_BYTES_MAX:
            raise invalid(f"tensor {name} of shape {_v2_shape(tensor.dims)} has more than {ROW_BYTES_MAX} bytes")


def _v2_shape(dims: Sequence[Dim]) -> list[int]:
    return [dim if isinstance(dim, int) else -1 for dim in dims]


def to_specs(tensors: Iterable[ModelTensor], *, batching: bool) -> tuple[TensorSpec, ...]:
    """Return the tensor specs of a signature: -1 for variable dimensions, and for the first one if `batching`."""
    return tuple(
        TensorSpec(name=p.name, datatype=p.datatype, shape=_shape(p, batching), optional=p.optional) for p in tensors
    )


def _shape(tensor: ModelTensor, batching: bool) -> tuple[int, ...]:
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in tensor.dims)
    return (-1, *shape[1:]) if batching else shape


def _tensor(value: onnx.ValueInfoProto, what: str, zipmaps: Collection[str] = ()) -> ModelTensor:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        if value.name in zipmaps:
            raise invalid(
                f"output {value.name!r} is a list of dictionaries (ZipMap): convert the model with "
                "options={'zipmap': False} to get a tensor of probabilities"
            )
        type_name = (kind or "untyped").removesuffix("_type").replace("_", " ")
        raise invalid(f"{what} {value.name!r} is of type {type_name}: only tensors can be served")
    tensor_type = value.type.tensor_type
    datatype = _DATATYPES.get(tensor_type.elem_type)
    if datatype is None:
        raise invalid(
            f"{what} {value.name!r} has elements of type {_type_name(tensor_type.elem_type)}, which v2 cannot carry"
        )
    if is_shapeless(value):
        raise invalid(
            f"{what} {value.name!r} has no shape: run onnx.shape_inference.infer_shapes on the model, or set it, "
            "there or as its dims in a config.pbtxt; variable sizes are fine"
        )
    return ModelTensor(value.name, datatype, tuple(_dim(dim) for dim in tensor_type.shape.dim))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
        return int(dim.dim_value)
    return None if _GENERATED.fullmatch(dim.dim_param) else dim.dim_param or None


def _type_name(number: int) -> str:
    return TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else str(number)


def index_ranges(model: onnx.ModelProto, inputs: Sequence[TensorSpec]) -> dict[str, tuple[int, int]]:
    """Return the least and the greatest index that each input may hold; inputs that are no indices are left out.

    A negative index counts from the end, as in ONNX. In a table of rows, an embedding, it is refused: frameworks refuse
    it, and the last row of a vocabulary is no answer to -1.
    """
    tables: dict[str, Sequence[int]] = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for spec in inputs:
        tables.pop(spec.name, None)  # a default that a request may replace
    sources = {spec.name: spec.name for spec in inputs if spec.datatype in _INTEGERS}
    found: dict[str, tuple[int, int]] = {}
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
