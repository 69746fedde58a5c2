"""The order in which a model file is looked at: cheap and certain first, running it last.

Imported by the checker process only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from millstream.services.ingest.batching_decision import BatchingDecision, Subject, decide, usable
from millstream.services.ingest.external_data import external_files
from millstream.services.ingest.graph import read_model
from millstream.services.ingest.model_io import Dim, ModelTensor, in_order, read_defaults, read_ports, specs
from millstream.services.ingest.onnx_checks import check_operators, check_structure, check_versions
from millstream.services.ingest.report import Checked, CheckTask
from millstream.services.ingest.trial_session import Array, Session
from millstream.services.ingest.warmup_trial import rehearse, rehearse_requests
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.signature import Signature
from millstream.services.model.warmup_check import check_warmups


def inspect(task: CheckTask, path: Path) -> Checked:
    """How the model at `path` is served. Raises Failure(INVALID)."""
    in_place = task.served is not None
    source = path.parent
    model = read_model(path)
    check_versions(model)
    files = external_files(model, source, archived=in_place or _came_in_archive(source, path))
    check_operators(model)
    inputs, outputs = read_ports(model)
    check_structure(path, in_place=in_place)
    compiled = None if in_place else task.folder / "compiled" / "onnx"
    subject = Subject(model, path, files, compiled, inputs, outputs, task.rows_max)
    verdict, session = decide(subject, task.batching)
    defaults = usable(subject, verdict, read_defaults(model))
    seen = [_as_seen(port, array) for port, array in _observed(outputs, verdict)]
    signature = Signature(
        inputs=specs(in_order(model, [*inputs, *defaults]), batching=verdict.batching),
        outputs=specs(seen, batching=verdict.batching),
        batching=verdict.batching,
    )
    notes = [*verdict.notes, _rehearsed(task, session, signature, tried=verdict.observed is not None)]
    return Checked(
        served=str(verdict.served.relative_to(task.folder)),
        files=tuple(_files_read(task.folder, verdict.served, files)),
        sources=tuple(_files_read(task.folder, path, files)),
        signature=signature,
        opset=_opset(model),
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}".strip()[:200],
        batching=verdict.decision,
        notes=tuple(note for note in notes if note),
    )


def _rehearsed(task: CheckTask, session: Session, signature: Signature, *, tried: bool) -> str | None:
    """Run what a worker runs before the version is ready; returns what is worth a note. Raises Failure(INVALID)."""
    check_warmups(ModelConfig(rows_max=task.rows_max, warmup=task.warmup), signature, task.folder)
    untried = rehearse(session, signature, task.rows_max)
    rehearse_requests(session, signature, task.warmup, task.folder)
    if untried is None or tried:
        return None
    return f"No made-up input runs, so only requests will show whether the model works: {untried}."


def _observed(outputs: Sequence[ModelTensor], verdict: BatchingDecision) -> list[tuple[ModelTensor, Array | None]]:
    arrays: Sequence[Array | None] = verdict.observed or [None] * len(outputs)
    return list(zip(outputs, arrays, strict=True))


def _as_seen(port: ModelTensor, array: Array | None) -> ModelTensor:
    """The port with its declared dimensions, as far as a run does not contradict them."""
    if array is None:
        return port
    if len(port.dims) != array.ndim:
        return port._replace(dims=(None,) * array.ndim)
    dims = tuple(dim if dim == size else _variable(dim) for dim, size in zip(port.dims, array.shape, strict=True))
    return port._replace(dims=dims)


def _variable(dim: Dim) -> Dim:
    return None if isinstance(dim, int) else dim


def _came_in_archive(source: Path, path: Path) -> bool:
    return any(other != path for other in source.iterdir())


def _files_read(folder: Path, served: Path, files: Sequence[str]) -> list[str]:
    return [str(path.relative_to(folder)) for path in (served, *(served.parent / name for name in files))]


def _opset(model: onnx.ModelProto) -> int:
    imports = {entry.domain: entry.version for entry in model.opset_import}
    return int(imports.get("", imports.get("ai.onnx", max(imports.values()))))
