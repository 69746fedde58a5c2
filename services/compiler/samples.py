"""Reads samples for calibration: an .npz of `input/<name>` arrays ─> the inputs of one run after the other.

Imported in the process of a compilation only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.compiler.candidate import Subject
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.npz import read_npz
from millstream.services.model.signature import TensorSpec

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]

INPUT = "input/"
SAMPLES_BYTES_MAX, ARRAYS_MAX = 1 << 28, 1024  # of the file, unpacked
ROWS_OF_A_RUN = 8  # more would only take memory: calibration is not measured
ROWS_MAX = 512  # of all samples; further ones are left out
#: Datatypes that ONNX Runtime's and OpenVINO's quantizers can be fed from numpy.
_FED = frozenset(NUMPY) - {"BF16", BYTES}


def can_be_sampled(subject: Subject) -> bool:
    """Return whether all inputs have datatypes that a quantizer can be fed with."""
    return all(spec.datatype in _FED for spec in subject.signature.inputs)


def read_feeds(path: Path | None, subject: Subject, rows_max: int = ROWS_MAX) -> list[Feed]:
    """Return the inputs of runs, in the shapes of the model. Raises Failure(INVALID).

    Args:
        path: the samples; None: there are none.
        subject: the version.
        rows_max: rows of all runs together, or runs of a version that does not batch.
    """
    if path is None:
        raise invalid("it needs samples of inputs for its calibration: send some, or accept random ones")
    try:
        found = read_npz(path, SAMPLES_BYTES_MAX, ARRAYS_MAX, lambda name: name.startswith(INPUT))
    except (OSError, ValueError) as error:
        raise invalid(f"the samples cannot be read: {error}") from error
    arrays = {name[len(INPUT) :]: array for name, array in found.items()}
    specs = {spec.name: spec for spec in subject.signature.inputs}
    feed = {name: _checked(name, array, specs) for name, array in arrays.items()}
    if missing := [name for name, spec in specs.items() if not spec.optional and name not in feed]:
        raise invalid(f"the samples have no input {missing[0]!r}: expected an array {INPUT}{missing[0]}")
    batching = subject.signature.batching
    runs = _runs(feed, min(subject.rows_max, ROWS_OF_A_RUN), rows_max) if batching else [feed]
    return [
        {name: in_model_shape(specs[name], array, batching=batching) for name, array in run.items()} for run in runs
    ]


def _checked(name: str, array: Array, specs: Mapping[str, TensorSpec]) -> Array:
    if name not in specs:
        raise invalid(f"the samples have an input {name!r}, which the version has not")
    spec = specs[name]
    if array.ndim != len(spec.shape) or array.dtype != NUMPY[spec.datatype]:
        raise invalid(
            f"the samples of {name!r} are {array.dtype} {list(array.shape)}, and the input is {spec.datatype} "
            f"{list(spec.shape)}"
        )
    return array


def _runs(feed: Feed, rows_of_a_run: int, rows_max: int) -> list[Feed]:
    """Split rows into runs. Raises Failure(INVALID) if the inputs differ in rows, or there are none."""
    counts = {len(array) for array in feed.values()}
    if len(counts) != 1 or counts == {0}:
        raise invalid(
            f"the samples must have the same number of rows in all inputs, at least 1; found {sorted(counts)}"
        )
    rows = min(counts.pop(), rows_max)
    starts = range(0, rows, rows_of_a_run)
    return [{name: array[at : min(rows, at + rows_of_a_run)] for name, array in feed.items()} for at in starts]


def in_model_shape(spec: TensorSpec, array: Array, *, batching: bool) -> Array:
    """Return an input in the shape that the model has, which may differ from the one that clients see."""
    if spec.model_shape is None:
        return array
    rows, seen = (array.shape[:1], array.shape[1:]) if batching else ((), array.shape)
    declared = spec.shape[1:] if batching else spec.shape
    sizes = iter([size for size, dim in zip(seen, declared, strict=True) if dim == -1])
    return array.reshape((*rows, *(next(sizes) if dim == -1 else dim for dim in spec.model_shape)))
