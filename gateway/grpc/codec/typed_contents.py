"""typed_contents: turns InferTensorContents into a tensor in raw form. Pure.

Source: Open Inference Protocol v2, gRPC, "Tensor Contents": datatypes of up to 32 bits share a field.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millstream.gateway.tensors.elements import raw_from_strings
from millstream.gateway.tensors.input_plan import Extent, InputPlan
from millstream.gateway.tensors.inputs import InputTensor
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, NUMPY

#: datatype -> its field, and the numpy type of the field's elements; FP16 and BF16 have no field
_FIELDS: dict[str, tuple[str, type[np.generic]]] = {
    "BOOL": ("bool_contents", np.bool_),
    "INT8": ("int_contents", np.int32),
    "INT16": ("int_contents", np.int32),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "UINT8": ("uint_contents", np.uint32),
    "UINT16": ("uint_contents", np.uint32),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}


_PIECE_ELEMENTS = 1 << 18


def tensor_of(plan: InputPlan, extent: Extent, contents: Any) -> InputTensor:
    """Return the tensor in `contents`, an InferTensorContents. Raises Failure(INVALID)."""
    contents_fields = [(descriptor.name, values) for descriptor, values in contents.ListFields()]
    if not contents_fields:
        if extent.elements:
            raise no_data(plan)
        return InputTensor(extent.shape, b"", 0)
    field = "bytes_contents" if plan.datatype == BYTES else _FIELDS.get(plan.datatype, ("", None))[0]
    if not field:
        raise invalid(f"{plan.datatype} data has no typed contents: send it in raw_input_contents{plan.where}")
    if len(contents_fields) > 1 or contents_fields[0][0] != field:
        raise invalid(f"{plan.datatype} data should be in '{field}' and nowhere else{plan.where}")
    values = contents_fields[0][1]
    if len(values) != extent.elements:
        raise _miscounted(plan, extent, len(values))
    raw = raw_from_strings(list(values)) if plan.datatype == BYTES else _numbers(plan, values)
    return InputTensor(extent.shape, raw, len(raw))


def no_data(plan: InputPlan) -> Exception:
    return invalid(f"unable to find data for input tensor '{plan.name}' for model '{plan.model}' in request.")


def _numbers(plan: InputPlan, values: Any) -> bytes:
    dtype = _FIELDS[plan.datatype][1]
    # In pieces, since numpy holds the interpreter's lock while it iterates.
    pieces = [
        np.fromiter(values[at : at + _PIECE_ELEMENTS], dtype, min(_PIECE_ELEMENTS, len(values) - at))
        for at in range(0, len(values), _PIECE_ELEMENTS)
    ]
    wide = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    target = NUMPY[plan.datatype]
    if target.itemsize == wide.dtype.itemsize:
        return wide.tobytes()
    narrow = wide.astype(target)
    if (narrow != wide).any():
        raise invalid(f"an element is out of the range of {plan.datatype}{plan.where}")
    return narrow.tobytes()


def _miscounted(plan: InputPlan, extent: Extent, count: int) -> Exception:
    if plan.datatype != BYTES:
        return plan.size_mismatch(extent, count * plan.item_bytes)
    return invalid(f"expected {extent.elements} strings in 'bytes_contents', got {count}{plan.where}")
