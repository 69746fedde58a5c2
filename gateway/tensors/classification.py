"""classification: scores -> the best classes as text, `"<value>:<index>[:<label>]"`, highest first. Pure.

Source: Triton's classification extension; floating-point values with six decimals, as its server prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import TensorSpec


def check_classifiable(spec: TensorSpec) -> None:
    """Raises Failure(INVALID) for an output whose values have no order to rank them by."""
    if spec.datatype in {"BOOL", BYTES}:
        raise invalid(f"class result not available for output '{spec.name}' due to its datatype {spec.datatype}")


def classify(output: OutputTensor, count: int, labels: Sequence[str], *, batching: bool) -> OutputTensor:
    """The `count` best classes of each row of `output`, or of all of it when the version does not batch.

    Gives BYTES of shape (rows, min(count, classes)), without rows when it does not batch. `labels`: by class.
    """
    assert isinstance(output.array, np.ndarray)
    scores = _comparable(output)
    rows = scores.reshape(output.shape[0], -1) if batching and scores.size else scores.reshape(1, -1)
    if batching and not scores.size:
        return OutputTensor(BYTES, (output.shape[0], min(count, prod(output.shape[1:]))), [])
    best = min(count, rows.shape[1])
    elements = [_text(row, index, labels) for row in rows for index in _ranking(row)[:best]]
    return OutputTensor(BYTES, (len(rows), best) if batching else (best,), elements)


def _comparable(output: OutputTensor) -> np.ndarray[Any, Any]:
    array = np.asarray(output.array)
    if output.datatype == "BF16":  # its 16 bits are the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _ranking(row: np.ndarray[Any, Any]) -> list[int]:
    """Indices from the highest value down; of equal ones the first comes first, and what is no number last."""
    if row.dtype.kind == "f":
        row = np.where(np.isnan(row), -np.inf, row)
    ascending = np.argsort(row[::-1], kind="stable")
    ranking: list[int] = (len(row) - 1 - ascending[::-1]).tolist()
    return ranking


def _text(row: np.ndarray[Any, Any], index: int, labels: Sequence[str]) -> bytes:
    value = row[index]
    text = f"{value:.6f}:{index}" if row.dtype.kind == "f" else f"{value}:{index}"
    if index < len(labels) and labels[index]:
        text += f":{labels[index]}"
    return text.encode()
