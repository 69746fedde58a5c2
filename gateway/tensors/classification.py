"""classification: scores -> the best classes as text, `"<value>:<index>[:<label>]"`, highest first. Pure.

Source: Triton's classification extension. Floating-point values have six decimals, as its server prints them.
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
    """Raise Failure(INVALID) for an output of a datatype whose values cannot be ranked."""
    if spec.datatype in {"BOOL", BYTES}:
        raise invalid(f"class result not available for output '{spec.name}' due to its datatype {spec.datatype}")


def classify(output: OutputTensor, count: int, labels: Sequence[str], *, batching: bool) -> OutputTensor:
    """Return the best classes of each row of `output`, or of the whole output when the version does not batch.

    Args:
        output: Scores.
        count: How many classes to return for each row.
        labels: Name of each class, by its index; may be shorter than the row.
        batching: Whether dimension 0 is the rows.

    Returns:
        BYTES of shape (rows, min(count, classes)); without rows when the version does not batch.
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
    if output.datatype == "BF16":  # 16 bits that are the upper half of an FP32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _ranking(row: np.ndarray[Any, Any]) -> list[int]:
    """Return the indices of `row` by descending value. Equal values keep their order, NaN comes last."""
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
