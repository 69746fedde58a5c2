"""LSTM, GRU and RNN: time is axis 0 and the batch axis 1, or the other way round with `layout` 1 (opset 14)."""

from __future__ import annotations

from millstream.plugins.proof.expression import ONE, Expression, number
from millstream.plugins.proof.node import Call, Rule, Rules, dims_of
from millstream.plugins.proof.value import Dependent, Rows, Value, free, rowed

_LENGTHS = 4
_STATES = (5, 6)


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
    "ReverseSequence": Rule(reversed_time),
    "GRU": Rule(recurrent),
    "LSTM": Rule(recurrent),
    "RNN": Rule(recurrent),
}
