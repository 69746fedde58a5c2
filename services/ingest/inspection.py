"""Inspects a model file: first the checks that are cheap and certain, then trial runs.

read ─> versions, weights, operators ─> mended ─> inputs and outputs, structure ─> batching decision ─> signature

Imported by the checker process only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import onnx.parser

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.batching_decision import BatchingDecision, ModelUnderCheck, decide, servable_defaults
from millstream.services.ingest.external_data import check_weights, weight_files
from millstream.services.ingest.graph import declare_channels, declare_shapes, read_model, save_model, stored_outside
from millstream.services.ingest.import_check import compare_samples
from millstream.services.ingest.importers import resolve
from millstream.services.ingest.mending import UNMENDED, mend
from millstream.services.ingest.model_io import (
    Dim,
    ModelTensor,
    check_bounds,
    in_graph_order,
    index_ranges,
    is_shapeless,
    read_defaults,
    read_inputs,
    read_tensors,
    to_specs,
)
from millstream.services.ingest.onnx_checks import check_operators, check_opsets, check_versions, structure_defect
from millstream.services.ingest.report import COMPILED, CheckedModel, CheckTask
from millstream.services.ingest.trial_inputs import find_probe
from millstream.services.ingest.trial_session import Array, Session, TrialError, TrialProgram
from millstream.services.ingest.warmup_trial import check_warmup
from millstream.services.model.signature import Signature
from millstream.services.model.version_files import LABEL_BYTES_MAX, LABEL_NAMES_MAX

_BYTES_MAX = 1 << 30  # for limits that a few numbers do not reach
_MODEL = """
<ir_version: 8, opset_import: ["": 17]>
rehearsal (float[N, 2] x) => (float[N, 2] y) <float[2, 2] weights = {0.5, -0.25, 0.125, 1.0}>
{
   product = MatMul(x, weights)
   y = Relu(product)
}
"""


def inspect(task: CheckTask, path: Path) -> CheckedModel:
    """Check the model at `path` and return how it is served. Raises Failure(INVALID)."""
    model = read_model(path)
    declare_shapes(model.graph, task.declared.shapes)
    declare_channels(model.graph)
    check_opsets(model)
    try:
        return _inspect(task, path, model)
    except Failure:
        check_versions(model)  # if they are too new, that explains what failed
        raise


def _inspect(task: CheckTask, path: Path, model: onnx.ModelProto) -> CheckedModel:
    in_place = task.served is not None
    source = path.parent
    files = _weights(model, source, alone=not in_place and _is_alone(source, path))
    check_operators(model)
    mends = UNMENDED if in_place else mend(model)
    served = save_model(model, files, source, task.folder / COMPILED / "mended") if mends.changed else path
    if not in_place and _declare_observed(model, served):
        served = save_model(model, files, source, task.folder / COMPILED / "observed")
    inputs, outputs = read_tensors(model)
    defect = structure_defect(model, None if in_place or files else served)
    compiled = None if in_place else task.folder / COMPILED / "onnx"
    subject = ModelUnderCheck(model, served, files, compiled, inputs, outputs, task.rows_max, defect=defect)
    defaults = read_defaults(model, task.declared.inputs)
    batching = task.batching
    if batching is None and any(one.name in task.declared.inputs and not one.has_rows for one in defaults):
        batching = False  # requests that share a run could not each set it
    try:
        decision, session = decide(subject, batching)
    except Failure as failure:
        if not defect:
            raise
        raise invalid(f"the model {defect}") from failure
    withheld = [one.name for one in defaults]
    defaults = servable_defaults(subject, decision, defaults)
    withheld = [name for name in withheld if name not in {one.name for one in defaults}]
    observed = [_with_observed_dims(tensor, array) for tensor, array in _observed_outputs(outputs, decision)]
    signature = Signature(
        inputs=to_specs(in_graph_order(model, [*inputs, *defaults]), batching=decision.batching),
        outputs=to_specs(observed, batching=decision.batching),
        batching=decision.batching,
    )
    trial, note = check_warmup(task, session, signature, tried=decision.observed is not None)
    imported = compare_samples(task, session, inputs, outputs)
    notes = [*mends.notes, *decision.notes, _withheld_note(withheld), note]
    return CheckedModel(
        served=str(decision.served.relative_to(task.folder)),
        files=tuple(_files_read(task.folder, decision.served, files)),
        sources=tuple(_files_read(task.folder, path, files)),
        signature=signature,
        opset=_opset(model),
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}".strip()[:200],
        batching=decision.outcome,
        notes=tuple(note for note in notes if note),
        trial=trial,
        index_ranges=index_ranges(model, signature.inputs),
        imported=imported,
        labels=_write_classes(task.folder, mends.classes),
    )


def _weights(model: onnx.ModelProto, folder: Path, *, alone: bool) -> list[str]:
    """Return the files that hold the model's weights; `alone`: whether no other file came with it. Raises Failure."""
    ends = weight_files(stored_outside(model))
    try:
        check_weights(ends, folder)
    except Failure as failure:
        hint = "; `millstream push` takes it from there, or upload a zip or tar of both" if alone else ""
        raise invalid(f"{failure.message}{hint}") from failure
    return sorted(ends)


def _withheld_note(names: Sequence[str]) -> str:
    """Return the note on inputs with a default that a request may not bring, as requests share runs; "" if none is."""
    if not names:
        return ""
    listed = ", ".join(repr(name[:80]) for name in names[:3]) + (", …" if len(names) > 3 else "")
    return f"Requests share runs, so they cannot set inputs with a default ({listed}): with batching off they can."


def _declare_observed(model: onnx.ModelProto, path: Path) -> bool:
    """Give outputs without a shape the number of dimensions that a run shows. Returns whether there are any."""
    outputs = [value for value in model.graph.output if is_shapeless(value)]
    if not outputs:
        return False
    inputs = read_inputs(model)
    with suppress(TrialError):
        unshaped = [ModelTensor(value.name, "", ()) for value in outputs]
        observed = find_probe(Session(path, inputs, unshaped), inputs).observed
        pairs = zip(outputs, observed, strict=True)
        declare_shapes(model.graph, {value.name: (-1,) * array.ndim for value, array in pairs})
    return True


def _write_classes(folder: Path, classes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Write the names of the columns of each output to a file; returns their paths, as those of configured labels."""
    labels: dict[str, str] = {}
    for at, (output, names) in enumerate(classes.items()):
        content = "\n".join(names).encode()
        numbered = list(names) == [str(number) for number in range(len(names))]
        large = len(names) > LABEL_NAMES_MAX or len(content) > LABEL_BYTES_MAX
        if numbered or large or content.count(b"\n") >= len(names):
            continue
        labels[output] = f"{COMPILED}/classes/{at}.txt"
        (folder / labels[output]).parent.mkdir(parents=True, exist_ok=True)
        (folder / labels[output]).write_bytes(content)
    return labels


def inspect_program(task: CheckTask, path: Path, program: TrialProgram) -> CheckedModel:
    """Try the model at `path`, which is no ONNX file, and return how it is served. Raises Failure(INVALID)."""
    if not program.outputs:
        raise invalid(f"{program.kind} has no outputs")
    check_bounds([*program.inputs, *program.outputs])
    subject = ModelUnderCheck(None, path, [], None, program.inputs, program.outputs, task.rows_max, program)
    decision, session = decide(subject, task.batching)
    observed = [_with_observed_dims(tensor, array) for tensor, array in _observed_outputs(program.outputs, decision)]
    signature = Signature(
        inputs=to_specs(program.inputs, batching=decision.batching),
        outputs=to_specs(observed, batching=decision.batching),
        batching=decision.batching,
    )
    trial, note = check_warmup(task, session, signature, tried=decision.observed is not None)
    files = tuple(str(one.relative_to(task.folder)) for one in (path, *program.files))
    return CheckedModel(
        served=files[0],
        files=files,
        sources=files,
        signature=signature,
        opset=program.opset,
        ir_version=program.version,
        producer=program.producer[:200],
        batching=decision.outcome,
        notes=tuple(one for one in (*decision.notes, note) if one),
        trial=trial,
        source_format=program.source_format,
        imported=compare_samples(task, session, program.inputs, program.outputs),
    )


def _observed_outputs(
    outputs: Sequence[ModelTensor], decision: BatchingDecision
) -> list[tuple[ModelTensor, Array | None]]:
    arrays: Sequence[Array | None] = decision.observed or [None] * len(outputs)
    return list(zip(outputs, arrays, strict=True))


def _with_observed_dims(tensor: ModelTensor, array: Array | None) -> ModelTensor:
    """Return the tensor, with a variable dimension wherever the outputs of a run contradict the declared one."""
    if array is None:
        return tensor
    if len(tensor.dims) != array.ndim:
        return tensor._replace(dims=(None,) * array.ndim)
    dims = tuple(dim if dim == size else _variable(dim) for dim, size in zip(tensor.dims, array.shape, strict=True))
    return tensor._replace(dims=dims)


def _variable(dim: Dim) -> Dim:
    return None if isinstance(dim, int) else dim


def _is_alone(source: Path, path: Path) -> bool:
    return all(other == path for other in source.iterdir())


def _files_read(folder: Path, served: Path, files: Sequence[str]) -> list[str]:
    return [str(path.relative_to(folder)) for path in (served, *(served.parent / name for name in files))]


def _opset(model: onnx.ModelProto) -> int:
    imports = {entry.domain: entry.version for entry in model.opset_import}
    return int(imports.get("", imports.get("ai.onnx", max(imports.values()))))


def rehearse() -> None:
    """Check a small model of our own, in the process that checkers are forked from. Nothing stays of it.

    A child then finds done what each first check does: code that was never run, caches, allocations, symbols that the
    linker looks up when they are first called. Without it, checking a small model takes a quarter longer.
    """
    resolve()
    with TemporaryDirectory(prefix="millstream-") as name:
        path = Path(name, "model.onnx")
        path.write_bytes(onnx.parser.parse_model(_MODEL).SerializeToString())
        task = CheckTask(
            folder=path.parent,
            batching=None,
            unpacked_bytes_max=_BYTES_MAX,
            memory_bytes_max=_BYTES_MAX,
            cpu_s_max=1,
            served=path.name,
        )
        inspect(task, path)
