"""Checks what a proof of independence claims: rows give the same outputs alone, together and in other orders."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime

Array = np.ndarray[Any, Any]


def load(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def taken(feeds: dict[str, Array], order: Sequence[int], rows: Collection[str]) -> dict[str, Array]:
    """Return the inputs, with only the rows at the positions `order` where an input has rows."""
    return {name: array[list(order)] if name in rows else array for name, array in feeds.items()}


def close(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind in "fcV":
        kind = np.complex128 if one.dtype.kind == "c" else np.float64
        return bool(np.allclose(one.astype(kind), other.astype(kind), rtol=1e-4, atol=1e-5, equal_nan=True))
    return bool((one == other).all())


def assert_independent(
    running: onnxruntime.InferenceSession,
    feeds: dict[str, Array],
    rows: Collection[str],
    alone: list[list[Array]],
    unlike: Collection[int] = (),
) -> None:
    """Check that each row gives the outputs in `alone`: together, in another order, and when it occurs twice.

    `unlike`: rows that are not compared, only in the way of others.
    """
    orders = [list(range(len(alone))), list(np.random.default_rng(0).permutation(len(alone)))]
    for order in (*orders, [*orders[1], *orders[0]]):
        together = running.run(None, taken(feeds, order, rows))
        for position, row in enumerate(order):
            if row in unlike:
                continue
            for one, all_rows in zip(alone[row], together, strict=True):
                assert all_rows.shape[:1] == (len(order),)
                assert close(all_rows[position : position + 1], one)


def run_alone(
    running: onnxruntime.InferenceSession, feeds: dict[str, Array], rows: Collection[str]
) -> list[list[Array]]:
    """Return the outputs of each row, run alone."""
    count = len(feeds[next(iter(rows))])
    return [running.run(None, taken(feeds, [row], rows)) for row in range(count)]
