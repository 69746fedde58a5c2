"""The inputs and outputs of a model file, as ONNX names them, and as a signature shows them.

Imported by the checker process only. Source: onnx.proto, TypeProto and TensorProto.DataType.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import onnx
from onnx import TensorProto

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.graph import default_inputs, fixed_inputs, nodes
from millstream.services.ingest.report import NAME_CHARACTERS_MAX, RANK_MAX, TENSORS_MAX
from millstream.services.model.datatypes import BYTES, ITEM_BYTES
from millstream.services.model.signature import TensorSpec

#: bytes of one tensor whose dimensions are all fixed: gateways make up such inputs to probe readiness
ROW_BYTES_MAX = 1 << 30

Dim = int | str | None
"""A fixed size, a named variable one, or a variable one without a name."""

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


def read_defaults(model: onnx.ModelProto) -> list[ModelTensor]:
    """Inputs that a caller may leave out, since the model has a value for them. What v2 cannot say is not offered."""
    found: list[ModelTensor] = []
    for value in default_inputs(model):
        with suppress(Failure):
            found.append(_port(value, "input", set())._replace(optional=True))
    return found


def in_order(model: onnx.ModelProto, ports: Iterable[ModelTensor]) -> list[ModelTensor]:
    """Inputs in the order in which the graph lists them."""
    places = {value.name: place for place, value in enumerate(model.graph.input)}
    return sorted(ports, key=lambda port: places[port.name])


def read_ports(model: onnx.ModelProto) -> tuple[list[ModelTensor], list[ModelTensor]]:
    """The model's inputs (those without a stored value) and outputs. Raises Failure(INVALID) for what v2 cannot say."""
    stored = fixed_inputs(model.graph)
    zipmaps = {name for node in nodes(model) if node.op_type == "ZipMap" for name in node.output}
    inputs = [_port(value, "input", zipmaps) for value in model.graph.input if value.name not in stored]
    outputs = [_port(value, "output", zipmaps) for value in model.graph.output]
    _check_bounds([*inputs, *outputs])
    texts = [port.name for port in (*inputs, *outputs) if port.datatype == BYTES]
    halves = [port.name for port in outputs if port.datatype == "BF16"]
    if texts and halves:
        raise invalid(f"ONNX Runtime cannot return BF16 ({halves[0]!r}) from a model with text ({texts[0]!r})")
    return inputs, outputs


def _check_bounds(ports: Sequence[ModelTensor]) -> None:
    """Refuse what every gateway and worker would have to carry along for each request, or could not make at all."""
    if len(ports) > TENSORS_MAX:
        raise invalid(f"the model has {len(ports)} inputs and outputs: at most {TENSORS_MAX} can be served")
    for port in ports:
        shown = repr(port.name[:80])
        if not port.name or len(port.name) > NAME_CHARACTERS_MAX:
            raise invalid(
                f"tensor {shown} has a name of {len(port.name)} characters: 1 to {NAME_CHARACTERS_MAX} are taken"
            )
        if len(port.dims) > RANK_MAX:
            raise invalid(f"tensor {shown} has {len(port.dims)} dimensions: at most {RANK_MAX} can be served")
        item = ITEM_BYTES.get(port.datatype, 1)
        if math.prod(dim for dim in port.dims if isinstance(dim, int)) * item > ROW_BYTES_MAX:
            raise invalid(f"tensor {shown} of shape {_shown(port.dims)} has more than {ROW_BYTES_MAX} bytes")


def _shown(dims: Sequence[Dim]) -> list[int]:
    return [dim if isinstance(dim, int) else -1 for dim in dims]


def specs(ports: Iterable[ModelTensor], *, batching: bool) -> tuple[TensorSpec, ...]:
    """What a signature shows of `ports`: -1 for variable dimensions, and for the rows when `batching`."""
    return tuple(
        TensorSpec(name=p.name, datatype=p.datatype, shape=_shape(p, batching), optional=p.optional) for p in ports
    )


def _shape(port: ModelTensor, batching: bool) -> tuple[int, ...]:
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in port.dims)
    return (-1, *shape[1:]) if batching else shape


def _port(value: onnx.ValueInfoProto, what: str, zipmaps: set[str]) -> ModelTensor:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        if value.name in zipmaps:
            raise invalid(
                f"output {value.name!r} is a list of dictionaries (ZipMap): convert the model with "
                "options={'zipmap': False} to get a tensor of probabilities"
            )
        shown = (kind or "untyped").removesuffix("_type").replace("_", " ")
        raise invalid(f"{what} {value.name!r} is of type {shown}: only tensors can be served")
    tensor = value.type.tensor_type
    datatype = _DATATYPES.get(tensor.elem_type)
    if datatype is None:
        raise invalid(
            f"{what} {value.name!r} has elements of type {_type_name(tensor.elem_type)}, which v2 cannot carry"
        )
    if not tensor.HasField("shape"):
        raise invalid(
            f"{what} {value.name!r} has no shape: run onnx.shape_inference.infer_shapes on the model, or set it; "
            "variable sizes are fine"
        )
    return ModelTensor(value.name, datatype, tuple(_dim(dim) for dim in tensor.shape.dim))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
        return int(dim.dim_value)
    return dim.dim_param or None


def _type_name(number: int) -> str:
    return TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else str(number)
