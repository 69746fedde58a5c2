"""Arrays of requests and answers as tensors of messages. BF16 is uint16, and text are objects of `bytes`."""

from __future__ import annotations

from typing import Any

import numpy as np

from millstream.plugins.children.message_channel import TensorData
from millstream.services.model.datatypes import BYTES, NUMPY, decode_elements, encode_elements

Array = np.ndarray[Any, Any]


def to_tensor(name: str, datatype: str, array: Array) -> TensorData:
    """Return an array as a tensor, without a copy where its elements are in order already."""
    if datatype == BYTES:
        return TensorData(name, datatype, array.shape, encode_elements(array.ravel().tolist()))
    ordered = np.ascontiguousarray(array, NUMPY[datatype])
    return TensorData(name, datatype, array.shape, ordered.reshape(-1).view(np.uint8).data)


def to_array(tensor: TensorData, *, copy: bool = True) -> Array:
    """Return a tensor as an array, with memory of its own unless `copy` is False and it holds numbers.

    Raises ValueError if its bytes do not fit its shape.
    """
    if tensor.datatype == BYTES:
        elements = decode_elements(tensor.data)
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(tensor.shape)
    if tensor.datatype not in NUMPY:
        raise ValueError(f"there is no datatype {tensor.datatype[:20]!r}")
    array = np.frombuffer(tensor.data, NUMPY[tensor.datatype])
    return (array.copy() if copy else array).reshape(tensor.shape)
