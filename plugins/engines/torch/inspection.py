"""Inspects a program of torch.export (.pt2): first what its file says, without PyTorch, then trial runs.

read, refuse what its load could execute ─> inputs and outputs ─> batching decision ─> signature ─> warm-up

Imported by the checker process only. It needs PyTorch where the gateway runs: a check in a worker's environment would
have to be sent there and back, for a package that takes 900 MB on the disk. Decided so; a gateway without it says what
to install.
"""

from __future__ import annotations

from pathlib import Path

from millstream.plugins.engines.torch.document import FORMAT, Program, ProgramTensor, read_program
from millstream.plugins.engines.torch.session import ProgramSession, import_torch
from millstream.services.errors import invalid
from millstream.services.ingest.batching_decision import ModelUnderCheck, decide
from millstream.services.ingest.import_check import compare_samples
from millstream.services.ingest.inspection import check_warmup, observed_outputs, with_observed_dims
from millstream.services.ingest.model_io import ModelTensor, check_bounds, to_specs
from millstream.services.ingest.proof import Proof
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.model.signature import Signature


class _Subject:
    """The program, for the decision about batching."""

    def __init__(self, program: Program, path: Path, inputs: list[ModelTensor], outputs: list[ModelTensor]) -> None:
        self._program = program
        self._path = path
        self._inputs = inputs
        self._outputs = outputs

    def open(self) -> ProgramSession:
        return ProgramSession(self._path, self._inputs, self._outputs)

    def prove(self) -> Proof:
        return Proof(False, "the program", "graphs of PyTorch are not analysed")


def inspect(task: CheckTask, path: Path) -> CheckedModel:
    """Check the program at `path` and return how it is served. Raises Failure(INVALID)."""
    program = read_program(path)
    import_torch(task.folder)
    inputs = [_model_tensor(tensor) for tensor in program.inputs]
    outputs = [_model_tensor(tensor) for tensor in program.outputs]
    if not outputs:
        raise invalid("the program has no outputs")
    check_bounds([*inputs, *outputs])
    subject = ModelUnderCheck(
        None, path, [], None, inputs, outputs, task.rows_max, _Subject(program, path, inputs, outputs)
    )
    decision, session = decide(subject, task.batching)
    observed = [with_observed_dims(tensor, array) for tensor, array in observed_outputs(outputs, decision)]
    signature = Signature(
        inputs=to_specs(inputs, batching=decision.batching),
        outputs=to_specs(observed, batching=decision.batching),
        batching=decision.batching,
    )
    trial, note = check_warmup(task, session, signature, tried=decision.observed is not None)
    file = str(path.relative_to(task.folder))
    return CheckedModel(
        served=file,
        files=(file,),
        sources=(file,),
        signature=signature,
        opset=program.opset,
        ir_version=program.schema,
        producer=f"torch {program.made_by}".strip()[:200],
        batching=decision.outcome,
        notes=tuple(one for one in (*decision.notes, note) if one),
        trial=trial,
        source_format=FORMAT,
        imported=compare_samples(task, session, inputs, outputs),
    )


def _model_tensor(tensor: ProgramTensor) -> ModelTensor:
    return ModelTensor(tensor.name, tensor.datatype, tensor.dims)
