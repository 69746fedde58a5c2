"""Operators on sequences: attention and rotary position embedding (opset 23), LSTM, GRU and RNN.

Axis 0 is the batch; of LSTM, GRU and RNN axis 0 is time and axis 1 the batch, or the other way round with `layout` 1
(opset 14).
"""

from __future__ import annotations

from millstream.plugins.proof.expression import ONE, Expression, number
from millstream.plugins.proof.node import Call, Rule, Rules, dims_of, unknown_dims
from millstream.plugins.proof.rules.normalization import same
from millstream.plugins.proof.value import Dependent, Rows, Value, free, rowed

_LENGTHS = 4
_STATES = (5, 6)
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


def recurrent(call: Call) -> list[Value]:
    """Rule of LSTM, GRU and RNN: Y [time, directions, batch, hidden] and last states [directions, batch, hidden]."""
    value = call.input(0)
    layout = call.flag("layout")
    batch = 0 if layout else 1
    dims = dims_of(value)
    if len(dims) != 3:
        raise Dependent("its input does not have three axes")
    rows = value.rows
    if rows is not None and rows.axis != batch:
        raise Dependent("the rows are not on the batch axis")
    for position, state in enumerate(call.inputs):
        if position == 0 or state is None:
            continue
        axis = 0 if position == _LENGTHS else batch
        expected = rows.moved(axis) if rows is not None and position in (_LENGTHS, *_STATES) else None
        if state.rows != expected:
            raise Dependent(f"input {position} of the operator does not have the rows that its batch has")
    return _outputs(call, dims, rows, layout)


def _outputs(call: Call, dims: tuple[Expression, ...], rows: Rows | None, layout: int) -> list[Value]:
    directions = number(2) if call.attribute("direction", b"forward") == b"bidirectional" else ONE
    hidden = number(int(call.attribute("hidden_size", 0))) if call.attribute("hidden_size", 0) else call.symbols.fresh()
    size = rows.size if rows is not None else dims[0 if layout else 1]
    time = dims[1 if layout else 0]
    sequence = [size, time, directions, hidden] if layout else [time, directions, size, hidden]
    state = [size, directions, hidden] if layout else [directions, size, hidden]
    if rows is None:
        return [free(sequence), free(state), free(state)]
    last = rowed(state, rows.moved(0 if layout else 1))
    return [rowed(sequence, rows.moved(0 if layout else 2)), last, last]


def reversed_time(call: Call) -> list[Value]:
    """Rule of ReverseSequence: time and batch are the first two axes, in either order; each row has a length."""
    value, lengths = call.input(0), call.input(1)
    axis = int(call.attribute("batch_axis", 1))
    expected = value.rows.moved(0) if value.rows is not None and value.rows.axis == axis else None
    if expected is None or lengths.rows != expected:
        raise Dependent("the rows are not on the batch axis of both inputs")
    return [Value(value.dims, value.rows)]


RULES: Rules = {
    "Attention": Rule(attention),
    "GRU": Rule(recurrent),
    "LSTM": Rule(recurrent),
    "RNN": Rule(recurrent),
    "ReverseSequence": Rule(reversed_time),
    "RotaryEmbedding": Rule(rotary),
}
