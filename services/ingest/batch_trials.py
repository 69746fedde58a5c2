"""Trials of batches: rows that run together must give what each gives alone. Imported by the checker process only.

original ─> random rows and an extreme one, each alone ─> Expected
candidate ─> the same rows in other orders, in batches up to the largest ─> Expected? ─> else Contradiction
A trial can show that rows influence each other; that they do not, only the graph shows (millstream.services.ingest.independence).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.trial_inputs import Probe, Style, draw, extreme_row, row_of
from millstream.services.ingest.trial_memory import room_for
from millstream.services.ingest.trial_session import Array, Session, TrialError
from millstream.services.model.agreement import column_scale, disagreeing_rows
from millstream.services.model.warmup_inputs import INPUT_BYTES_MAX

#: rows that are run alone for each style of values, beside an extreme one; fewer where a run takes long
_ROWS_MAX, _ROWS_MIN = 8, 3
#: no style is begun, and no larger batch run, that would go beyond this time; the first batch is always run
_SECONDS_MAX = 3.0
_SIZES = (1, 2, 3, 4, 5, 8)


class Contradiction(Exception):
    """What a trial shows against batches, as the end of a sentence."""


class Expected(NamedTuple):
    """Rows, and what the original gives for each alone.

    `inputs`: of all rows, one after the other; `outputs`: for each output, the rows one after the other. `extreme`: whether
    the last row is one of huge values. `seconds`: what a run of one row takes.
    """

    inputs: list[Array]
    outputs: list[Array]
    extreme: bool
    seconds: float

    @property
    def rows(self) -> int:
        return len(self.inputs[0])

    @property
    def ordinary(self) -> int:
        """How many of the rows, from the first on, are not extreme."""
        return self.rows - self.extreme


def expect(
    session: Session, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor], probe: Probe
) -> list[Expected]:
    """Run rows of several styles alone; empty if none of the styles runs. Raises Contradiction."""
    expected: list[Expected] = []
    start = time.monotonic()
    for style in dict.fromkeys((probe.style, Style.UNIFORM, Style.WIDE)):
        if expected and time.monotonic() - start > _SECONDS_MAX:
            break
        try:
            expected.append(_alone(session, inputs, outputs, probe.size, style))
        except TrialError:  # these values are not for this model; the probe's are
            continue
    return expected


def check(session: Session, outputs: Sequence[ModelTensor], expected: Sequence[Expected], rows_max: int) -> None:
    """Run the rows together, with at most `rows_max` in a batch. Raises Contradiction."""
    generator = np.random.default_rng(rows_max)
    start = time.monotonic()
    largest = 1
    for trial in expected:
        _compare(session, outputs, trial, np.array([0]))
        order = generator.permutation(trial.rows)
        _compare(session, outputs, trial, order[:rows_max])
    for size in batch_sizes(rows_max):
        for trial in expected[:1]:
            left_s = _SECONDS_MAX - (time.monotonic() - start)
            row_bytes = sum(array[:1].nbytes for array in trial.inputs)
            if size * trial.seconds > left_s or size * row_bytes > INPUT_BYTES_MAX or not room_for(size, largest):
                return
            order = generator.permutation(np.resize(generator.permutation(trial.rows), size))
            if not _compare(session, outputs, trial, order):
                return
            largest = size


def batch_sizes(rows_max: int) -> list[int]:
    """1, 2, 3, 4, 5, 8, 16, 32, … and `rows_max`."""
    doubled = [1 << power for power in range(4, 17)]
    return sorted({size for size in (*_SIZES, *doubled) if size < rows_max} | {rows_max})


def constant_outputs(outputs: Sequence[ModelTensor], expected: Sequence[Expected]) -> list[str]:
    """Names of outputs that no trial changed: that they were the same in a batch says nothing."""
    return [
        port.name
        for index, port in enumerate(outputs)
        if not any(_varies(port.datatype, trial.outputs[index][: trial.ordinary]) for trial in expected)
    ]


def _varies(datatype: str, rows: Array) -> bool:
    return bool(rows.size) and bool(disagreeing_rows(datatype, rows, np.broadcast_to(rows[:1], rows.shape)))


def _alone(
    session: Session, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor], size: int, style: Style
) -> Expected:
    arrays = draw(inputs, _ROWS_MAX, size, style)
    start = time.monotonic()
    results = [session.run(row_of(arrays, 0))]
    seconds = time.monotonic() - start
    rows = max(_ROWS_MIN, min(_ROWS_MAX, math.floor(_SECONDS_MAX / 3 / max(seconds, 1e-6))))
    results += [session.run(row_of(arrays, row)) for row in range(1, rows)]
    arrays = [array[:rows] for array in arrays]
    extreme = extreme_row(inputs, arrays)
    try:
        results.append(session.run(extreme))
        arrays = [np.concatenate(pair) for pair in zip(arrays, extreme, strict=True)]
    except TrialError:  # such values are not for this model
        extreme = []
    merged = [_stacked(port, [row[index] for row in results]) for index, port in enumerate(outputs)]
    return Expected(arrays, merged, bool(extreme), seconds)


def _stacked(port: ModelTensor, rows: Sequence[Array]) -> Array:
    for array in rows:
        if array.shape[:1] != (1,):
            raise Contradiction(f"output {port.name!r} of one row has the shape {list(array.shape)}")
        if array.shape != rows[0].shape:
            raise Contradiction(f"the shape of output {port.name!r} depends on the values of the row")
    return np.concatenate(rows)


def _compare(session: Session, outputs: Sequence[ModelTensor], trial: Expected, order: Array) -> bool:
    """Run the rows of `trial` at the positions `order` together. False: there is no memory for so many."""
    rows = len(order)
    try:
        together = session.run([np.ascontiguousarray(array[order]) for array in trial.inputs])
    except TrialError as error:
        if error.memory and rows > trial.rows:
            return False
        raise Contradiction(f"it does not run on {rows} rows ({error})") from error
    extreme = order >= trial.ordinary
    for port, actual, alone in zip(outputs, together, trial.outputs, strict=True):
        if actual.shape != (rows, *alone.shape[1:]):
            raise Contradiction(f"output {port.name!r} of {rows} rows has the shape {list(actual.shape)}")
        for chosen, pool in ((~extreme, alone[: trial.ordinary]), (extreme, alone[trial.ordinary :])):
            scale = column_scale(port.datatype, pool)
            if chosen.any() and disagreeing_rows(port.datatype, actual[chosen], alone[order[chosen]], scale=scale):
                raise Contradiction(_difference(port, rows))
    return True


def _difference(port: ModelTensor, rows: int) -> str:
    if rows == 1:
        return f"output {port.name!r} differs between two runs on the same row"
    return f"output {port.name!r} of a row depends on the rows beside it, in a trial of {rows} rows"
