"""Attention and rotary position embedding of the ONNX standard (opset 23): axis 0 is the batch."""

from __future__ import annotations

from millstream.plugins.proof.expression import ONE
from millstream.plugins.proof.node import Call, Rule, Rules, dims_of, unknown_dims
from millstream.plugins.proof.rules.normalization import same
from millstream.plugins.proof.value import Dependent, Rows, Value, rowed

_MASK = 3
_POSITION_IDS = 3


def batch_rows(call: Call) -> Rows:
    """Return the layout of the rows of the first operand. Raises Dependent unless they are on axis 0."""
    rows = call.input(0).rows
    if rows is None or rows.axis != 0 or rows.outer != ONE or rows.inner != ONE:
        raise Dependent("the rows are not on the batch axis")
    return rows


def check_batched(call: Call, rows: Rows, *positions: int) -> None:
    """Raise Dependent if one of the operands is present and has a different row layout."""
    for position in positions:
        value = call.optional(position)
        if value is not None and value.rows != rows:
            raise Dependent(f"input {position} of the operator does not have the rows of the first")


def check_shared(call: Call, *positions: int) -> None:
    """Raise Dependent if one of the operands has rows."""
    for position in positions:
        value = call.optional(position)
        if value is not None and value.rows is not None:
            raise Dependent(f"input {position} of the operator is computed from rows")


def check_broadcast(call: Call, position: int, rank: int, rows: Rows) -> None:
    """Raise Dependent if the operand, broadcast to `rank` axes, would be combined with rows on an axis other than 0."""
    value = call.optional(position)
    if value is None:
        return
    dims = dims_of(value)
    if value.rows is not None and (value.rows != rows or len(dims) != rank):
        raise Dependent(f"input {position} of the operator has its rows on another axis")
    if value.rows is None and len(dims) == rank and dims[0] != ONE:
        raise Dependent("rows are combined with an axis that has no rows")


def attention(call: Call) -> list[Value]:
    """Rule of Attention (Q, K, V, mask, past key, past value, valid lengths): each row attends to itself."""
    rows = batch_rows(call)
    check_batched(call, rows, 1, 2, 4, 5, 6)
    check_broadcast(call, _MASK, 4, rows)
    rank = len(dims_of(call.input(0)))
    result = rowed([rows.size, *unknown_dims(call, rank - 1)], rows)
    return [result, *(rowed([rows.size, *unknown_dims(call, 3)], rows) for _ in range(3))]


def rotary(call: Call) -> list[Value]:
    """Rule of RotaryEmbedding (X, cosines, sines, positions): with positions the tables are shared, else per row."""
    rows = batch_rows(call)
    if call.optional(_POSITION_IDS) is not None:
        check_batched(call, rows, _POSITION_IDS)
        check_shared(call, 1, 2)
    else:
        check_batched(call, rows, 1, 2)
    return [same(call.input(0))]


RULES: Rules = {"Attention": Rule(attention), "RotaryEmbedding": Rule(rotary)}
