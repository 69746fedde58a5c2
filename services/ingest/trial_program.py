"""Decides how to serve a model that is no ONNX file and whose graph is not analysed: trial runs alone.

inputs, outputs, a way to run ─> batching decision ─> signature ─> warm-up ─> CheckedModel

Imported by the checker process only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.services.errors import invalid
from millstream.services.ingest.batching_decision import ModelUnderCheck, decide
from millstream.services.ingest.import_check import compare_samples
from millstream.services.ingest.inspection import check_warmup, observed_outputs, with_observed_dims
from millstream.services.ingest.model_io import ModelTensor, check_bounds, to_specs
from millstream.services.ingest.onnx_checks import MESSAGE_CHARACTERS_MAX
from millstream.services.ingest.proof import Proof
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.ingest.trial_session import Array, TrialError
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature

Run = Callable[[Sequence[Array]], list[Array]]


class TrialProgram(NamedTuple):
    """A model to try.

    Args:
        kind: what it is, for messages: "the function".
        run: returns all outputs for the inputs, both in order; BF16 is its bits in uint16. Raises anything.
        unproven: why no graph shows whether rows are independent.
        files: further files that a worker reads.
        version: of the file's schema.
    """

    kind: str
    inputs: list[ModelTensor]
    outputs: list[ModelTensor]
    run: Run
    unproven: str
    source_format: str
    producer: str
    version: int = 0
    opset: int = 0
    files: tuple[Path, ...] = ()

    def open(self) -> _Session:
        return _Session(self)

    def prove(self) -> Proof:
        return Proof(False, self.kind, self.unproven)


class _Session:
    """Runs the model for trials."""

    def __init__(self, program: TrialProgram) -> None:
        self._program = program

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return all outputs for the inputs, both in order. Raises TrialError."""
        try:
            return self._program.run(arrays)
        except Exception as error:
            raise TrialError(library_message(error, None, MESSAGE_CHARACTERS_MAX) or type(error).__name__) from error

    def run_as_worker(self, signature: Signature, arrays: Mapping[str, Array]) -> list[Array]:
        """Return all outputs for inputs by name. Raises TrialError."""
        missing = [tensor.name for tensor in self._program.inputs if tensor.name not in arrays]
        if missing:
            raise TrialError(f"inputs {missing} are missing")
        return self.run([np.ascontiguousarray(arrays[tensor.name]) for tensor in self._program.inputs])


def inspect_program(task: CheckTask, path: Path, program: TrialProgram) -> CheckedModel:
    """Try the model at `path` and return how it is served. Raises Failure(INVALID)."""
    if not program.outputs:
        raise invalid(f"{program.kind} has no outputs")
    check_bounds([*program.inputs, *program.outputs])
    subject = ModelUnderCheck(None, path, [], None, program.inputs, program.outputs, task.rows_max, program)
    decision, session = decide(subject, task.batching)
    observed = [with_observed_dims(tensor, array) for tensor, array in observed_outputs(program.outputs, decision)]
    signature = Signature(
        inputs=to_specs(program.inputs, batching=decision.batching),
        outputs=to_specs(observed, batching=decision.batching),
        batching=decision.batching,
    )
    trial, note = check_warmup(task, session, signature, tried=decision.observed is not None)
    files = tuple(str(one.relative_to(task.folder)) for one in (path, *program.files))
    return CheckedModel.model_validate(
        {
            "served": files[0],
            "files": files,
            "sources": files,
            "signature": signature,
            "opset": program.opset,
            "ir_version": program.version,
            "producer": program.producer[:200],
            "batching": decision.outcome,
            "notes": tuple(one for one in (*decision.notes, note) if one),
            "trial": trial,
            "source_format": program.source_format,
            "imported": compare_samples(task, session, program.inputs, program.outputs),
        }
    )
