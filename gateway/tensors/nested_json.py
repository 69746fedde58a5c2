"""Outputs of a reply -> JSON, nested as their shapes are. For protocols whose replies name no shapes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import orjson

from millstream.gateway.tensors.json_numbers import dump_numbers
from millstream.gateway.tensors.numpy_arrays import as_numbers
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import Failure, invalid


def text_of(output: OutputTensor, *, b64: bool = False) -> bytes:
    """Return the output as JSON, nested as its shape is. NaN and infinities are written as in Python and TensorFlow.

    Args:
        output: An output of any datatype.
        b64: Write BYTES elements as `{"b64": "…"}` rather than as strings.

    Raises:
        Failure: INVALID for BYTES elements that are not UTF-8, without `b64`.
    """
    array = output.array
    if isinstance(array, list):
        return orjson.dumps(nested(_texts(array, b64=b64), output.shape))
    values = as_numbers(output)
    return dump_numbers(values) if values.ndim else dump_numbers(values.reshape(1))[1:-1]


def rows_of(output: OutputTensor) -> list[OutputTensor]:
    """Return one output for each index of dimension 0, without that dimension."""
    count, *rest = output.shape
    array = output.array
    if isinstance(array, list):
        size = prod(rest)
        parts: list[Any] = [array[at * size : (at + 1) * size] for at in range(count)]
    else:
        parts = list(array.reshape(output.shape))
    return [OutputTensor(output.datatype, tuple(rest), part) for part in parts]


def nested(flat: list[Any], shape: Sequence[int]) -> Any:
    """Return `flat` as lists of lists; with a shape of no dimensions, the one element."""
    if not shape:
        return flat[0]
    if 0 in shape:
        return np.empty(shape).tolist()
    for size in reversed(shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)]
    return flat


def _texts(elements: list[bytes], *, b64: bool) -> list[Any]:
    if b64:
        return [{"b64": base64.b64encode(element).decode()} for element in elements]
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise _not_utf8() from None


def _not_utf8() -> Failure:
    return invalid(
        "an output holds bytes that are not UTF-8 and have no JSON form: name the output '…_bytes', or use v2 with "
        "binary data"
    )
