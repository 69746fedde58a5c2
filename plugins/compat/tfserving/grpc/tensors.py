"""TensorProto -> the input of a plan, and an output -> TensorProto. Pure.

A TensorProto has its elements as bytes (`tensor_content`) or in the field of its datatype (`float_val`, …). Replies use
the fields, as TensorFlow Serving does: some clients read nothing else.
Source: TensorFlow, TensorProto and Tensor::FromProto.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millstream.gateway.connection.error_reply import too_large
from millstream.gateway.grpc.codec.encode import varint
from millstream.gateway.tensors.elements import normalize_booleans
from millstream.gateway.tensors.input_plans import CheckedInput
from millstream.gateway.tensors.inputs import Extent, InputPlan, InputTensor
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, NUMPY, encode_elements

#: datatype -> its number in DataType, the field of its elements, and the numpy type of these
_FORMS: dict[str, tuple[int, str, type[np.generic]]] = {
    "FP32": (1, "float_val", np.float32),
    "FP64": (2, "double_val", np.float64),
    "INT32": (3, "int_val", np.int32),
    "UINT8": (4, "int_val", np.int32),
    "INT16": (5, "int_val", np.int32),
    "INT8": (6, "int_val", np.int32),
    "BYTES": (7, "string_val", np.object_),
    "INT64": (9, "int64_val", np.int64),
    "BOOL": (10, "bool_val", np.bool_),
    "BF16": (14, "half_val", np.int32),
    "UINT16": (17, "int_val", np.int32),
    "FP16": (19, "half_val", np.int32),
    "UINT32": (22, "uint32_val", np.uint32),
    "UINT64": (23, "uint64_val", np.uint64),
}
_DATATYPES = {number: datatype for datatype, (number, _, _) in _FORMS.items()}
#: datatypes whose elements in raw form are also the packed field: its number
_RAW_FIELDS = {"FP32": 5, "FP64": 6, "BOOL": 11}
#: datatypes of 16 bits, whose bits are in an int32
_HALVES = frozenset({"FP16", "BF16"})
_PIECE_ELEMENTS = 1 << 18
_ELEMENT_BYTES = 12  # of a string beside its characters: its length, and a reference to it


def read_tensor(plan: InputPlan, tensor: Any, bytes_max: int) -> CheckedInput:
    """Return the input in a TensorProto.

    Args:
        plan: the input.
        tensor: the message.
        bytes_max: limit on an input whose elements are one that is repeated.

    Raises:
        Failure: INVALID; TOO_LARGE.
    """
    datatype = _DATATYPES.get(tensor.dtype)
    if datatype is None:
        raise invalid(f"the dtype {tensor.dtype} is not supported{plan.where}")
    if tensor.tensor_shape.unknown_rank:
        raise invalid(f"the tensor_shape has an unknown rank{plan.where}")
    extent = plan.fit(datatype, tuple([dim.size for dim in tensor.tensor_shape.dim]))
    raw = (
        _content(plan, extent, tensor.tensor_content)
        if tensor.tensor_content
        else _values(plan, extent, tensor, bytes_max)
    )
    return CheckedInput(extent, InputTensor(extent.shape, raw, len(raw)))


def form_of(tensor: Any) -> tuple[str | None, tuple[int, ...]]:
    """Return datatype and shape as a TensorProto has them; None: the datatype is not supported."""
    return _DATATYPES.get(tensor.dtype), tuple([dim.size for dim in tensor.tensor_shape.dim])


def _content(plan: InputPlan, extent: Extent, content: bytes) -> bytes:
    if plan.datatype == BYTES:
        raise invalid(f"strings are in 'string_val', not in 'tensor_content'{plan.where}")
    if len(content) != extent.size_bytes:
        raise plan.size_mismatch(extent, len(content))
    return bytes(normalize_booleans(memoryview(content))) if plan.datatype == "BOOL" else content


def _values(plan: InputPlan, extent: Extent, tensor: Any, bytes_max: int) -> bytes:
    """Return the elements in the field of the datatype. Missing ones are the last one again, or zero."""
    _, field, kind = _FORMS[plan.datatype]
    values = getattr(tensor, field)
    missing = extent.elements - len(values)
    if missing < 0:
        raise invalid(f"{len(values)} elements in '{field}' for a tensor_shape with {extent.elements}{plan.where}")
    if plan.datatype == BYTES:
        last = values[-1] if values else b""
        if missing * (len(last) + _ELEMENT_BYTES) > bytes_max:
            raise too_large(bytes_max)
        return encode_elements([*values, *[last] * missing])
    if missing and extent.size_bytes > bytes_max:
        raise too_large(bytes_max)
    given = _numbers(plan, values, kind)
    if not missing:
        return given.tobytes()
    filled = np.full(extent.elements, given[-1] if len(given) else 0, given.dtype)
    filled[: len(given)] = given
    return filled.tobytes()


def _numbers(plan: InputPlan, values: Any, kind: type[np.generic]) -> np.ndarray[Any, Any]:
    # In pieces, since numpy holds the interpreter's lock while it iterates.
    pieces = [
        np.fromiter(values[at : at + _PIECE_ELEMENTS], kind, min(_PIECE_ELEMENTS, len(values) - at))
        for at in range(0, len(values), _PIECE_ELEMENTS)
    ]
    wide = np.concatenate(pieces) if pieces else np.empty(0, kind)
    target = np.dtype("<u2") if plan.datatype in _HALVES else NUMPY[plan.datatype]
    if target.itemsize == wide.dtype.itemsize:
        return wide
    narrow = wide.astype(target)
    if (narrow != wide).any():
        raise invalid(f"an element is out of the range of {plan.datatype}{plan.where}")
    return narrow


def write_tensor(output: OutputTensor, tensor: Any) -> None:
    """Write an output into an empty TensorProto."""
    datatype, shape, array = output
    tensor.dtype, field, _ = _FORMS[datatype]
    tensor.tensor_shape.SetInParent()
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)
    number = _RAW_FIELDS.get(datatype)
    if isinstance(array, list):
        tensor.string_val.extend(array)
    elif number is not None:
        raw = array.tobytes()
        tensor.MergeFromString(bytes((number << 3 | 2,)) + varint(len(raw)) + raw)
    else:
        bits = array.view(np.uint16) if datatype in _HALVES else array
        getattr(tensor, field).extend(bits.ravel().tolist())
