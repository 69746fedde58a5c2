"""Reads the inputs and outputs of a model file and converts them to the tensor specs of a signature.

Imported by the checker process only. Source: onnx.proto, TypeProto and TensorProto.DataType.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
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
