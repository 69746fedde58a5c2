"""Compares a converted model with the answers of its source framework. Imported by the checker process only.

samples (.npz) ─> runs of the converted model ─> the output that differs most ─> within the tolerance? ─> ImportRecord
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from millstream.services.errors import invalid
from millstream.services.ingest.comparison import Difference, compare, worst
from millstream.services.ingest.import_samples import KEPT_BYTES_MAX, read_sample
from millstream.services.ingest.importers import Sample
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.report import CheckTask, Converted
from millstream.services.ingest.trial_session import Array, TrialError, TrialSession
from millstream.services.model.agreement import as_float
from millstream.services.model.datatypes import BYTES
from millstream.services.model.manifest import ImportRecord


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
        importer=converted.importer,
        producer=converted.producer,
        rows=rows,
        output=largest.output,
        difference=largest.absolute,
        rtol=converted.rtol,
        atol=converted.atol,
        columns=converted.columns,
        columns_without_null=converted.columns_without_null,
        categories=converted.categories,
        embeddings=converted.embeddings,
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
    except (ValueError, zipfile.BadZipFile) as error:
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
    pairs = zip(outputs, answered, strict=True)
    return {tensor.name: as_float("BF16", array) if tensor.datatype == "BF16" else array for tensor, array in pairs}


def _fed(tensor: ModelTensor, array: Array) -> Array:
    return array.astype(object) if tensor.datatype == BYTES else np.ascontiguousarray(array).reshape(array.shape)


def _rows(sample: Sample) -> int:
    first = next(iter(sample.inputs.values()), None)
    return len(first) if first is not None and first.ndim else 1
