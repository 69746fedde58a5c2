"""Runs one compilation. A third-party compiler that reads an untrusted model may crash, hang or exhaust the memory.

python -m millstream.plugins.compile.compile_process --parent PID
CompileTask (JSON on standard input) ─> limits, sandbox ─> target ─> CompileOutcome (JSON on standard output)
`services.compiler.compile_runner` starts it, limits its time, and deletes what it wrote if it fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from millstream.plugins.compile.candidate import Bounds, Candidate, Compiled, Missing, Subject
from millstream.plugins.compile.compile_task import SCRATCH, CompileOutcome, CompileTask
from millstream.plugins.compile.targets import get_target
from millstream.plugins.compile.targets.base import Target
from millstream.services.errors import Failure, invalid
from millstream.services.metrics.gpus import close_driver
from millstream.services.model.signature import needed_inputs
from millstream.services.process.inheritance import group_guard
from millstream.services.process.threads import lower_process
from millstream.services.sandbox.confine import Limits, begin, confine, serve_task

ERROR_CHARACTERS_MAX = 600
#: Operators that quantize by the values of the whole batch.
_MIXING = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})


def main() -> NoReturn:
    """Compile one candidate. Exits with 0 if it printed an outcome."""
    parser = argparse.ArgumentParser(prog="python -m millstream.plugins.compile.compile_process")
    parser.add_argument("--parent", type=int, required=True, help="process id of what started this one")
    begin(parser.parse_args().parent)
    serve_task(lambda task: _outcome(CompileTask.model_validate_json(task)).model_dump_json().encode())


def _outcome(task: CompileTask) -> CompileOutcome:
    began = time.monotonic()
    try:
        target = get_target(task.candidate.target)
        _check_available(target, task.subject.device)
        with group_guard() if target.programs() else nullcontext():
            _confine(task, target)
            began = time.monotonic()
            compiled = _compile(task, target)
        return CompileOutcome(compiled=compiled, seconds=round(time.monotonic() - began, 3))
    except Failure as failure:
        error = failure.message
    except MemoryError:
        error = f"it needs more than the {task.memory_bytes >> 20} MiB of memory that a compilation may use"
    except Exception as failure:
        sys.excepthook(*sys.exc_info())
        error = f"{type(failure).__name__}: {failure}"
    return CompileOutcome(error=" ".join(error.split())[:ERROR_CHARACTERS_MAX], seconds=time.monotonic() - began)


def _confine(task: CompileTask, target: Target) -> None:
    """Limit the memory, processor time, files and rights of this process. Raises OSError."""
    if task.low_priority:
        lower_process(idle=not task.share)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    folder = task.folder.resolve()
    scratch = folder / SCRATCH
    scratch.mkdir(exist_ok=True)
    tempfile.tempdir = str(scratch)
    model = task.subject.path
    # The served file may be a link to another folder; its weights are beside it.
    reads = [model.parent, model.parent.resolve(), model.resolve(), *([task.samples] if task.samples else [])]
    cpu_s = int(task.seconds_max * cores) + 1
    limits = Limits(task.memory_bytes, cpu_s, task.written_bytes, reserved_free=True)
    confine(reads, [folder], target.programs(), limits=limits)


def _check_available(target: Target, device: str) -> None:
    """Raise Failure(INVALID) if the target cannot be used here. To be called unconfined: the sandbox hides GPUs."""
    missing: Missing | None = target.available(device)
    close_driver()  # its open files would let the sandbox reach the GPU
    if missing is not None:
        raise invalid(f"{target.name} is not available: {missing.why}")


def _compile(task: CompileTask, target: Target) -> Compiled:
    candidates: dict[str, Candidate] = {one.key: one for one in target.candidates(task.subject)}
    if task.candidate.key not in candidates:
        raise invalid(f"{task.candidate.key} is not a candidate for this version")
    if not task.subject.path.is_file():
        raise invalid(f"{task.subject.path.name}: there is no such file")
    bounds = _proven_bounds(target, task.subject)
    compiled = target.compile(task.subject, task.candidate, task.folder, task.samples)
    compiled = compiled.model_copy(update={"bounds": bounds})
    if compiled.files[:1] and compiled.files[0].endswith(".onnx") and task.subject.signature.batching:
        return _check_rows(compiled, task.subject, task.folder)
    return compiled


def _proven_bounds(target: Target, subject: Subject) -> Bounds:
    """Return within which inputs the types of the target's library suffice. Raises Failure(INVALID): unproven."""
    if target.narrows is None or subject.source_format != "onnx":
        return {}
    from millstream.plugins.compile.narrowing import prove_file  # imports onnx

    proof = prove_file(subject.path, target.narrows)
    if proof.why:
        raise invalid(f"{target.name} would compute it with narrower types than its own: {proof.why}")
    return proof.bounds


def _check_rows(compiled: Compiled, subject: Subject, folder: Path) -> Compiled:
    """Return `compiled` with `rows_independent`, and a note where it is False."""
    reason = _dependence(folder / compiled.files[0], subject)
    if not reason:
        return compiled
    note = f"rows influence each other ({reason}): for runs of one row only"
    return compiled.model_copy(update={"rows_independent": False, "notes": (*compiled.notes, note)})


def _dependence(path: Path, subject: Subject) -> str:
    """Return why rows may influence each other; empty: they do not, as far as they did not before.

    Dynamic quantization takes its scales from the whole batch: an answer would depend on who shares the run.
    """
    import onnx

    from millstream.plugins.proof.analysis import prove

    names = [spec.name for spec in needed_inputs(subject.signature)]
    model = onnx.load(str(path), load_external_data=False)
    proof = prove(model, names)
    if proof.proven:
        return ""
    if prove(onnx.load(str(subject.path), load_external_data=False), names).proven:
        return f"{proof.culprit}: {proof.reason}"
    # Trials alone showed that the version batches, so the graph of its compiled form need not prove it.
    mixing = sorted({node.op_type for node in model.graph.node if node.op_type in _MIXING})
    return f"{mixing[0]}: it quantizes by the values of the whole batch" if mixing else ""


if __name__ == "__main__":
    main()
