"""Runs trial batches: each row must have the same outputs in a batch as alone. Imported by the checker process only.

original  ─> random rows and an extreme one, each run alone ─> Expected
candidate ─> the same rows in other orders, in batches up to the largest ─> equal to Expected, or Contradiction
A trial can show that rows influence each other. That they never do, only the graph can prove (`ingest.proof`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.trial_inputs import Probe, Style, draw, extreme_row, row_of
from millstream.services.ingest.trial_session import Array, TrialError, TrialSession, memory_allows
from millstream.services.model.agreement import column_scale, disagreeing_rows
from millstream.services.model.warmup_inputs import INPUT_BYTES_MAX

#: random rows that are run alone for each style of values, plus an extreme one; fewer if a run is slow
_ROWS_MAX, _ROWS_MIN = 8, 3
#: time budget: no further style and no larger batch is started beyond it; the first batch always runs
_SECONDS_MAX = 3.0
_SIZES = (1, 2, 3, 4, 5, 8)


class Contradiction(Exception):
    """A trial shows that requests must not share runs. The message is the reason, worded to follow "…: "."""


class Influence(Contradiction):
    """A trial shows that a row's outputs depend on other rows, or on chance; each row has its outputs all the same."""


class Expected(NamedTuple):
    """Trial rows, and the outputs of the original for each row alone.

    Args:
        inputs: for each input, all rows concatenated.
        outputs: for each output, all rows concatenated.
        extreme: whether the last row has huge values.
        seconds: the duration of a run of one row.
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
        """The number of rows that are not extreme; they come first."""
        return self.rows - self.extreme


def run_rows_alone(
    session: TrialSession, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor], probe: Probe
) -> list[Expected]:
    """Run rows of several styles alone. Returns an empty list if the model runs on none. Raises Contradiction."""
    expected: list[Expected] = []
    start = time.monotonic()
    for style in dict.fromkeys((probe.style, Style.UNIFORM, Style.WIDE)):
        if expected and time.monotonic() - start > _SECONDS_MAX:
            break
        try:
            expected.append(_run_style_alone(session, inputs, outputs, probe.size, style))
        except TrialError:  # the model rejects values of this style; it accepts those of the probe's style
            continue
    return expected


def check_batches(
    session: TrialSession, outputs: Sequence[ModelTensor], expected: Sequence[Expected], rows_max: int
) -> None:
    """Run the rows in batches of up to `rows_max` and compare with `expected`. Raises Contradiction."""
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
            if size * trial.seconds > left_s or size * row_bytes > INPUT_BYTES_MAX or not memory_allows(size, largest):
                return
            order = generator.permutation(np.resize(generator.permutation(trial.rows), size))
            if not _compare(session, outputs, trial, order):
                return
            largest = size


def batch_sizes(rows_max: int) -> list[int]:
    """Return the batch sizes to try: 1, 2, 3, 4, 5, 8, 16, 32, … and `rows_max`."""
    powers_of_two = [1 << power for power in range(4, 17)]
    return sorted({size for size in (*_SIZES, *powers_of_two) if size < rows_max} | {rows_max})


def constant_outputs(outputs: Sequence[ModelTensor], expected: Sequence[Expected]) -> list[str]:
    """Return the names of outputs that are equal for all trial rows: comparing them in a batch proves nothing."""
    return [
        tensor.name
        for index, tensor in enumerate(outputs)
        if not any(_varies(tensor.datatype, trial.outputs[index][: trial.ordinary]) for trial in expected)
    ]


def _varies(datatype: str, rows: Array) -> bool:
    return bool(rows.size) and bool(disagreeing_rows(datatype, rows, np.broadcast_to(rows[:1], rows.shape)))


def _run_style_alone(
    session: TrialSession, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor], size: int, style: Style
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
    except TrialError:  # the model rejects extreme values
        extreme = []
    merged = [_stacked(tensor, [row[index] for row in results]) for index, tensor in enumerate(outputs)]
    return Expected(arrays, merged, bool(extreme), seconds)


def _stacked(tensor: ModelTensor, rows: Sequence[Array]) -> Array:
    for array in rows:
        if array.shape[:1] != (1,):
            raise Contradiction(f"output {tensor.name!r} of one row has the shape {list(array.shape)}")
        if array.shape != rows[0].shape:
            raise Contradiction(f"the shape of output {tensor.name!r} depends on the values of the row")
    return np.concatenate(rows)


def _compare(session: TrialSession, outputs: Sequence[ModelTensor], trial: Expected, order: Array) -> bool:
    """Run the rows of `trial` at the positions `order` in one batch and compare. False if the batch runs out of memory.

    Raises Contradiction.
    """
    rows = len(order)
    try:
        together = session.run([np.ascontiguousarray(array[order]) for array in trial.inputs])
    except TrialError as error:
        if error.out_of_memory and rows > trial.rows:
            return False
        raise Contradiction(f"it does not run on {rows} rows ({error})") from error
    extreme = order >= trial.ordinary
    for tensor, actual, alone in zip(outputs, together, trial.outputs, strict=True):
        if actual.shape != (rows, *alone.shape[1:]):
            raise Contradiction(f"output {tensor.name!r} of {rows} rows has the shape {list(actual.shape)}")
        for chosen, pool in ((~extreme, alone[: trial.ordinary]), (extreme, alone[trial.ordinary :])):
            scale = column_scale(tensor.datatype, pool)
            if chosen.any() and disagreeing_rows(tensor.datatype, actual[chosen], alone[order[chosen]], scale=scale):
                raise Influence(_difference(tensor, rows))
    return True


def _difference(tensor: ModelTensor, rows: int) -> str:
    if rows == 1:
        return f"output {tensor.name!r} differs between two runs on the same row"
    return f"output {tensor.name!r} of a row depends on the other rows of its batch, in a trial of {rows} rows"
