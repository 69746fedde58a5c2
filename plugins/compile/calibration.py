"""Feeds samples to calibration: a file of samples ─> the inputs of one run after the other, in the model's shapes.

Imported in the process of a compilation only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from millstream.plugins.compile.candidate import Subject
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.samples import Array, read_inputs
from millstream.services.model.signature import TensorSpec

Feed = dict[str, Array]

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
    feed = read_inputs(path, subject.signature)
    specs = {spec.name: spec for spec in subject.signature.inputs}
    batching = subject.signature.batching
    runs = _runs(feed, min(subject.rows_max, ROWS_OF_A_RUN), rows_max) if batching else [feed]
    return [
        {name: in_model_shape(specs[name], array, batching=batching) for name, array in run.items()} for run in runs
    ]


def _runs(feed: Feed, rows_of_a_run: int, rows_max: int) -> list[Feed]:
    """Split rows into runs."""
    rows = min(len(next(iter(feed.values()))), rows_max)
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


def cosine(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Return the cosine of two vectors; 1.0 if both are zero, 0.0 if one is, or has numbers that are not finite."""
    norms = float(np.linalg.norm(one)), float(np.linalg.norm(other))
    if one.shape != other.shape or not all(map(np.isfinite, norms)):
        return 0.0
    if not all(norms):
        return float(not any(norms))
    return float(one @ other / (norms[0] * norms[1]))
