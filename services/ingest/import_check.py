"""Compares a converted model with the answers of its source framework. Imported by the checker process only.

samples (.npz) ─> runs of the converted model ─> the output that differs most ─> within the tolerance? ─> ImportRecord
Integers, booleans and text agree when they are equal. Floats agree within `atol + rtol * |expected|`; NaN agrees with
NaN, and an infinity with the same infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.services.errors import invalid
from millstream.services.ingest.importers import KEPT_BYTES_MAX, Sample, read_sample
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.report import CheckTask, Converted
from millstream.services.ingest.trial_session import Array, TrialError, TrialSession
from millstream.services.model.agreement import as_float
from millstream.services.model.datatypes import BYTES
from millstream.services.model.manifest import ImportFacts, ImportRecord

#: how many times the tolerance a difference is where no number says it: a wrong label, shape or kind, or NaN
_WRONG = float("inf")
_EXCERPT_CHARACTERS = 60


class Difference(NamedTuple):
    """The largest difference of one output.

    Args:
        absolute: the difference itself; 0 for outputs that are not numbers.
        tolerances: how many times the tolerance it is; above 1 the outputs disagree.
        where: its place and both values, for a message.
    """

    output: str
    absolute: float
    tolerances: float
    where: str


def compare_samples(
    task: CheckTask, session: TrialSession, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]
) -> ImportRecord | None:
    """Return how well the model agrees with its source framework; None for a model that was not converted.

    Raises Failure(INVALID) with the output that differs most, or for samples that do not fit the model: the model may
    have written them itself.
    """
    converted = task.imported
    if converted is None:
        return None
    differences: list[Difference] = []
    rows = 0
    unknown: set[str] = set()
    compared: set[str] = set()
    for path in converted.samples:
        sample = _read(task.folder / path)
        for name, array in sample.outputs.items():
            (unknown if _says_nothing(array) else compared).add(name)
        answered = _run(converted, session, sample, inputs, outputs)
        differences += compare(answered, sample.outputs, converted.rtol, converted.atol)
        rows += _rows(sample)
    if not differences:
        raise invalid(f"{converted.importer} gave no answer that the converted model could be compared with")
    largest = worst(differences)
    if largest.tolerances > 1:
        raise invalid(_disagreement(converted, largest))
    if unknown - compared:
        raise invalid(
            f"{converted.importer} answers nothing but NaN or infinity in output {min(unknown - compared)!r}, on all "
            "inputs that were drawn: its weights are damaged, or its training did not converge"
        )
    kept = converted.samples[0]
    return ImportRecord(
        **converted.model_dump(include=set(ImportFacts.model_fields)),
        rows=rows,
        output=largest.output,
        difference=largest.absolute,
        samples=kept if (task.folder / kept).stat().st_size <= KEPT_BYTES_MAX else None,
    )


def _says_nothing(array: Array) -> bool:
    """Return whether an output has numbers, none of which is finite: a comparison with them proves nothing."""
    return bool(array.size) and array.dtype.kind == "f" and not np.isfinite(array).any()


def _disagreement(converted: Converted, difference: Difference) -> str:
    return (
        f"the converted model does not answer as {converted.importer} does: output {difference.output!r}: "
        f"{difference.where} (tolerance {converted.atol:g} + {converted.rtol:g} x the value; {converted.producer})"
    )


def _read(path: Path) -> Sample:
    try:
        return read_sample(path)
    except ValueError as error:
        raise invalid(f"the samples of the import cannot be read: {error}") from error


def _run(
    converted: Converted,
    session: TrialSession,
    sample: Sample,
    inputs: Sequence[ModelTensor],
    outputs: Sequence[ModelTensor],
) -> Mapping[str, Array]:
    missing = [tensor.name for tensor in inputs if tensor.name not in sample.inputs]
    if missing:
        raise invalid(f"the samples of the import have no input {missing[0]!r}")
    try:
        answered = session.run([_fed(tensor, sample.inputs[tensor.name]) for tensor in inputs])
    except TrialError as error:
        message = f"the converted model fails on inputs that {converted.importer} answers: {error}"
        raise invalid(message) from error
    return by_name(outputs, answered)


def by_name(tensors: Sequence[ModelTensor], arrays: Sequence[Array]) -> dict[str, Array]:
    """Return the outputs of a trial run by name; BF16 as FP64."""
    pairs = zip(tensors, arrays, strict=True)
    return {tensor.name: as_float("BF16", array) if tensor.datatype == "BF16" else array for tensor, array in pairs}


def _fed(tensor: ModelTensor, array: Array) -> Array:
    return array.astype(object) if tensor.datatype == BYTES else np.ascontiguousarray(array).reshape(array.shape)


def _rows(sample: Sample) -> int:
    first = next(iter(sample.inputs.values()), None)
    return len(first) if first is not None and first.ndim else 1


def compare(actual: Mapping[str, Array], expected: Mapping[str, Array], rtol: float, atol: float) -> list[Difference]:
    """Return the largest difference of each output of `expected`, in its order."""
    return [_compare_output(name, actual.get(name), array, rtol, atol) for name, array in expected.items()]


def worst(differences: list[Difference]) -> Difference:
    """Return the difference that is largest relative to its tolerance."""
    return max(differences, key=lambda difference: difference.tolerances)


def _compare_output(name: str, actual: Array | None, expected: Array, rtol: float, atol: float) -> Difference:
    if actual is None:
        return Difference(name, 0.0, _WRONG, "the converted model has no such output")
    if actual.shape != expected.shape:
        return Difference(name, 0.0, _WRONG, f"the shape is {_shape(actual)} instead of {_shape(expected)}")
    if _is_text(actual) != _is_text(expected):
        return Difference(name, 0.0, _WRONG, f"the datatype is {actual.dtype} instead of {expected.dtype}")
    if not expected.size:
        return Difference(name, 0.0, 0.0, "it is empty")
    if _is_text(expected) or (actual.dtype.kind in "biu" and expected.dtype.kind in "biu"):
        return _compare_discrete(name, actual, expected)
    return _compare_numbers(name, actual.astype(np.float64), expected.astype(np.float64), rtol, atol)


def _compare_discrete(name: str, actual: Array, expected: Array) -> Difference:
    left, right = (array.astype(str) if _is_text(array) else array for array in (actual, expected))
    wrong = np.asarray(left != right)
    if not wrong.any():
        return Difference(name, 0.0, 0.0, "")
    return Difference(name, 0.0, _WRONG, _where(actual, expected, int(np.argmax(wrong))))


def _compare_numbers(name: str, actual: Array, expected: Array, rtol: float, atol: float) -> Difference:
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        absolute = np.where(same, 0.0, np.abs(actual - expected))
        allowed = atol + rtol * np.abs(expected)
        tolerances = np.divide(absolute, allowed, out=np.where(absolute > 0, _WRONG, 0.0), where=allowed > 0)
    finite = same | (np.isfinite(actual) & np.isfinite(expected))
    tolerances = np.where(finite, tolerances, _WRONG)
    at = int(np.argmax(tolerances))
    difference = float(absolute.flat[at])
    where = _where(actual, expected, at)
    return Difference(name, difference if np.isfinite(difference) else 0.0, float(tolerances.flat[at]), where)


def _where(actual: Array, expected: Array, at: int) -> str:
    """Return both values at the position `at` of the flat arrays, and its row where there are rows."""
    row = f"in row {int(np.unravel_index(at, expected.shape)[0])} " if expected.ndim else ""
    return f"{row}it is {_value(actual, at)} instead of {_value(expected, at)}"


def _value(array: Array, at: int) -> str:
    value = array.flat[at]
    if _is_text(array):
        return repr(str(value))[:_EXCERPT_CHARACTERS]
    return f"{value:.6g}" if array.dtype.kind == "f" else str(value)


def _shape(array: Array) -> str:
    return str(list(array.shape))


def _is_text(array: Array) -> bool:
    return array.dtype.kind in "OUS"
