"""Warm-up: run a new instance with made-up inputs of 1, 2, 4, … rows and note how long each takes.

signature ─> inputs that run ─> for each size: one warm run, then the fastest of a few ─> Profile
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from services.datatypes import BYTES, NUMPY
from services.errors import Code, Failure
from services.profile import Profile
from services.tensor import Signature, TensorSpec, needed_inputs
from workers.backends.base import Array, Instance, OutOfMemory

Clock = Callable[[], float]

RUNS_MIN = 3
RUNS_MAX = 9
#: share of the budget that one size may use beyond its first RUNS_MIN runs
SIZE_SHARE = 0.05
#: larger inputs are not made up for a measurement
INPUT_BYTES_MAX = 1 << 28
#: what a variable dimension that is not the rows is tried with, in this order
VARIABLE_SIZES = (1, 2, 8, 16, 32, 64, 128, 224, 256)
#: what every element is tried with: a zero is a valid index anywhere, a one a valid length or divisor
FILLS = (0, 1)


def _variable(signature: Signature) -> bool:
    """Is a dimension other than the rows variable?"""
    fixed_from = 1 if signature.batching else 0
    return any(-1 in spec.shape[fixed_from:] for spec in signature.inputs)


def _tensor(spec: TensorSpec, batching: bool, rows: int, size: int, fill: int) -> Array:
    shape = [size if dim == -1 else dim for dim in spec.shape]
    if batching:
        shape[0] = rows
    if spec.datatype == BYTES:
        return np.full(shape, str(fill).encode(), dtype=object)
    if spec.datatype == "BF16":
        # the bits of 0.0 and 1.0
        return np.full(shape, 0x3F80 * fill, dtype=np.uint16)
    return np.full(shape, fill, dtype=NUMPY[spec.datatype])


def make_inputs(signature: Signature, rows: int, size: int = 1, fill: int = 0) -> dict[str, Array]:
    """Inputs of `rows` rows that fit the signature: every variable dimension `size`, every element `fill`.

    Optional ones are left out.
    """
    return {spec.name: _tensor(spec, signature.batching, rows, size, fill) for spec in needed_inputs(signature)}


def _bytes(inputs: dict[str, Array]) -> int:
    return sum(array.nbytes for array in inputs.values())


def _runnable(instance: Instance, signature: Signature) -> tuple[int, int] | None:
    """The first (size, fill) that one row runs with; None if no size does.

    Raises Failure(MODEL) with the first reason if there is no size to choose: then it can only be the model.
    """
    variable = _variable(signature)
    reason: Failure | None = None
    for size in VARIABLE_SIZES if variable else (1,):
        for fill in FILLS:
            try:
                instance.run(make_inputs(signature, 1, size, fill))
            except Failure as failure:
                reason = reason or failure
            else:
                return size, fill
    if variable or reason is None:
        return None
    raise Failure(Code.MODEL, f"the model fails on a first run: {reason.message}") from reason


def _sizes(signature: Signature, rows_max: int) -> Iterator[int]:
    """1, 2, 4, … and the largest; a version that does not batch has one size."""
    rows = 1
    while signature.batching and rows < rows_max:
        yield rows
        rows *= 2
    yield rows_max if signature.batching else 1


def _timed(instance: Instance, inputs: dict[str, Array], clock: Clock, budget_s: float) -> float:
    """Seconds of the fastest run, after one that is not counted: the first of a size sets up its memory.

    Not the median: a machine that starts something else meanwhile adds to some of them, and sizes are compared.
    """
    instance.run(inputs)
    spans: list[float] = []
    began = clock()
    while len(spans) < RUNS_MIN or (len(spans) < RUNS_MAX and clock() - began < budget_s):
        started = clock()
        instance.run(inputs)
        spans.append(clock() - started)
    return min(spans)


def measure(
    instance: Instance, signature: Signature, rows_max: int, budget_s: float, clock: Clock = time.perf_counter
) -> Profile:
    """Measure runs of 1, 2, 4, … `rows_max` rows, as many sizes as `budget_s` seconds allow and at least one.

    A size is not begun if it looks as if it would not fit into what is left (twice the last size's time for each
    run). With variable dimensions of which none of the tried sizes runs, the profile is empty. Raises
    Failure(MODEL) if the model cannot run at all, or runs one row and fails with more.
    """
    began = clock()
    found = _runnable(instance, signature)
    if found is None:
        return Profile({})
    size, fill = found
    seconds: dict[int, float] = {}
    for rows in _sizes(signature, rows_max):
        expected = 2 * (RUNS_MIN + 1) * max(seconds.values(), default=0.0)
        inputs = make_inputs(signature, rows, size, fill)
        if seconds and (clock() - began + expected > budget_s or _bytes(inputs) > INPUT_BYTES_MAX):
            break
        try:
            seconds[rows] = _timed(instance, inputs, clock, budget_s * SIZE_SHARE)
        except OutOfMemory:
            if not seconds:
                raise
            break  # fewer rows do
        except Failure as failure:
            largest = max(seconds, default=1)
            message = f"the model runs {largest} rows but not {rows}: {failure.message}; set rows_max to {largest}"
            raise Failure(Code.MODEL, message) from failure
    return Profile(seconds)
