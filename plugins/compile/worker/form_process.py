"""python -m millstream.plugins.compile.worker.form_process: compile one candidate, or load a form and run it.

stdin: CompileTask ─> limits, sandbox ─> target ─> stdout: CompileOutcome
stdin: Opening ─> limits, sandbox ─> load; then TimeRuns | Answer, a line each ─> run ─> stdout: Said, a line each

A crash, a hang or hunger for memory ends this process and loses this candidate alone: `form_runner` starts it, limits
its time, and deletes what it wrote. A candidate is compiled in one process and measured in another, which has the
memory and the libraries of a load alone. Times do not include the pipe.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from pydantic import BaseModel, TypeAdapter

from millstream.plugins.compile.candidate import SCRATCH, Bounds, Compiled, CompileOutcome, CompileTask, Subject
from millstream.plugins.compile.form_runner import (
    ANSWER_BYTES_MAX,
    MEMORY_SPARE,
    TIMES_MAX,
    WRITTEN_BYTES_MAX,
    Answer,
    Opening,
    Said,
    TimeRuns,
    write_outputs,
)
from millstream.plugins.compile.race.bounds import Extreme, extreme_call, extreme_rows
from millstream.plugins.compile.race.samples import rows_of
from millstream.plugins.compile.targets import get_target
from millstream.plugins.compile.targets.base import Target
from millstream.services.errors import Failure, invalid
from millstream.services.metrics.gpus import close_driver
from millstream.services.model.samples import read_inputs
from millstream.services.model.signature import needed_inputs
from millstream.services.process.inheritance import group_guard
from millstream.services.process.threads import lower_process
from millstream.services.sandbox.confine import Limits, begin, confine
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array, Backend, Instance
from millstream.workers.backends.engine_parts import Reshaped
from millstream.workers.models.memory_limit import MemoryLimit, prefer_for_oom_kill

ERROR_CHARACTERS_MAX = 1000
WARM_UPS = 2  # runs of a size before its first block
_CPU_S_MAX = 1 << 30  # of a measuring process: the driver ends one that takes long
#: Operators that quantize by the values of the whole batch.
_MIXING = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
_FIRST: TypeAdapter[CompileTask | Opening] = TypeAdapter(CompileTask | Opening)
_COMMAND: TypeAdapter[TimeRuns | Answer] = TypeAdapter(TimeRuns | Answer)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m millstream.plugins.compile.worker.form_process")
    parser.add_argument("--parent", type=int, required=True, help="process id of what started this one")
    begin(parser.parse_args().parent)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print write to standard error

    def say(said: BaseModel) -> None:
        print(said.model_dump_json(), file=output, flush=True)

    first = _FIRST.validate_json(sys.stdin.readline())
    if isinstance(first, CompileTask):
        say(_outcome(first))
        return
    prefer_for_oom_kill()
    backend = get_backend(first.backend)  # looks plug-ins up, in files that the sandbox hides
    _confine_measuring(first)
    limit = MemoryLimit(first.memory_bytes)
    try:
        measurements = Measurements(first, backend)
    except BaseException as error:
        say(Said(error=_why(error)))
        return
    limit.follow()
    say(Said())
    for line in sys.stdin:
        command = _COMMAND.validate_json(line)
        try:
            say(measurements.time(command) if isinstance(command, TimeRuns) else measurements.answer(command))
        except Exception as error:
            say(Said(error=_why(error)))


def _why(error: BaseException, memory: str = "it found no memory") -> str:
    if isinstance(error, Failure):
        return error.message
    if isinstance(error, MemoryError):
        return memory
    sys.excepthook(type(error), error, error.__traceback__)
    return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS_MAX]


def _confine(
    path: Path, inputs: Iterable[Path], folder: Path, programs: Iterable[Path], limits: Limits, *, accelerator: bool
) -> None:
    """Restrict this process to the served file, which may be a link to a folder with its weights, and `folder`."""
    model = path.absolute()
    reads = [model.parent, model.parent.resolve(), model.resolve(), *inputs]
    confine(reads, [folder.resolve()], programs, limits=limits, accelerator=accelerator)


# A compilation.


def _outcome(task: CompileTask) -> CompileOutcome:
    try:
        target = get_target(task.candidate.target)
        missing = target.available(task.subject.device)  # unconfined: the sandbox hides GPUs
        close_driver()  # its open files would let the sandbox reach the GPU
        if missing is not None:
            raise invalid(f"{target.name} is not available: {missing.why}")
        with group_guard() if target.programs() else nullcontext():
            _confine_compilation(task, target)
            return CompileOutcome(compiled=_compile(task, target))
    except Exception as error:
        short = f"it needs more than the {task.memory_bytes >> 20} MiB of memory that a compilation may use"
        return CompileOutcome(error=" ".join(_why(error, short).split())[:ERROR_CHARACTERS_MAX])


def _confine_compilation(task: CompileTask, target: Target) -> None:
    """Limit the memory, processor time, files and rights of this process. Raises OSError."""
    if task.low_priority:
        lower_process(idle=not task.share)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    scratch = task.folder.resolve() / SCRATCH
    scratch.mkdir(exist_ok=True)
    tempfile.tempdir = str(scratch)
    limits = Limits(task.memory_bytes, int(task.seconds_max * cores) + 1, task.written_bytes, reserved_free=True)
    samples = [task.samples] if task.samples is not None else []
    _confine(task.subject.path, samples, task.folder, target.programs(), limits, accelerator=False)


def _compile(task: CompileTask, target: Target) -> Compiled:
    subject = task.subject
    if all(one.key != task.candidate.key for one in target.candidates(subject)):
        raise invalid(f"{task.candidate.key} is not a candidate for this version")
    if not subject.path.is_file():
        raise invalid(f"{subject.path.name}: there is no such file")
    bounds = _proven_bounds(target, subject)
    compiled = target.compile(subject, task.candidate, task.folder, task.samples)
    compiled = compiled.model_copy(update={"bounds": bounds})
    if not (compiled.files[:1] and compiled.files[0].endswith(".onnx") and subject.signature.batching):
        return compiled
    reason = _dependence(task.folder / compiled.files[0], subject)
    if not reason:
        return compiled
    note = f"rows influence each other ({reason}): for runs of one row only"
    return compiled.model_copy(update={"rows_independent": False, "notes": (*compiled.notes, note)})


def _proven_bounds(target: Target, subject: Subject) -> Bounds:
    """Return within which inputs the types of the target's library suffice. Raises Failure(INVALID): unproven."""
    if target.narrows is None or subject.source_format != "onnx":
        return {}
    from millstream.plugins.compile.narrowing import prove_file  # imports onnx

    proof = prove_file(subject.path, target.narrows)
    if proof.why:
        raise invalid(f"{target.name} would compute it with narrower types than its own: {proof.why}")
    return proof.bounds


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


# A measuring process.


def _confine_measuring(opening: Opening) -> None:
    """Restrict this process to what it measures, before it loads any of it. Raises OSError."""
    tempfile.tempdir = str(opening.folder.resolve())
    programs = [Path(sys.executable).resolve(), *get_target("iree").programs()] if opening.starts_programs else []
    memory_bytes = int(opening.memory_bytes * MEMORY_SPARE) or resource.RLIM_INFINITY
    limits = Limits(memory_bytes, _CPU_S_MAX, WRITTEN_BYTES_MAX, reserved_free=True)
    inputs, accelerator = opening.inputs.parent.resolve(), opening.device != "cpu"
    _confine(opening.path, [inputs], opening.folder, programs, limits, accelerator=accelerator)


class Measurements:
    """A loaded instance, and the samples that it is measured with."""

    def __init__(self, opening: Opening, backend: Backend) -> None:
        self._signature = opening.signature
        self._inputs = read_inputs(opening.inputs, opening.signature)
        backend.prepare(opening.device)
        self._instance: Instance = backend.load(
            opening.path, opening.signature, opening.device, opening.threads, options=opening.options
        )
        if opening.signature.reshaped:
            self._instance = Reshaped(self._instance, opening.signature)
        self._warm: set[int] = set()

    def time(self, command: TimeRuns) -> Said:
        """Return the seconds of runs, at least one."""
        batch = self._batch(self._inputs, command.rows, 0)
        if command.rows not in self._warm:
            for _ in range(WARM_UPS):
                self._instance.run(batch)
            self._warm.add(command.rows)
        times: list[float] = []
        began = now = time.perf_counter()
        while not times or (now - began < command.seconds and len(times) < TIMES_MAX):
            self._instance.run(batch)
            ended = time.perf_counter()
            times.append(ended - now)
            now = ended
        return Said(times_s=tuple(times))

    def answer(self, command: Answer) -> Said:
        """Run all samples of a file, and write the outputs with the rows of all runs joined."""
        inputs = read_inputs(command.inputs, self._signature)
        if command.extreme is not None:
            outputs = self._run(self._extreme(inputs, command.extreme, command.rows))
        elif not self._signature.batching:
            outputs = self._run(inputs)
        else:
            count = len(next(iter(inputs.values())))
            runs = [
                self._run(self._batch(inputs, min(command.rows, count - first), first))
                for first in range(0, count, command.rows)
            ]
            outputs = [np.concatenate(parts) for parts in zip(*runs, strict=True)]
        if sum(array.nbytes for array in outputs) > ANSWER_BYTES_MAX:
            return Said(error="its outputs are too large to compare")
        write_outputs(command.to, outputs)
        return Said()

    def _extreme(self, inputs: Mapping[str, Array], extreme: Extreme, rows: int) -> Mapping[str, Array]:
        spec = next((one for one in self._signature.inputs if one.name == extreme.name), None)
        if not self._signature.batching:
            return extreme_call(inputs, spec, extreme.value)
        return extreme_rows(rows_of(inputs, rows), spec, extreme.value, rows)

    def _batch(self, inputs: Mapping[str, Array], rows: int, first: int) -> Mapping[str, Array]:
        return rows_of(inputs, rows, first) if self._signature.batching else inputs

    def _run(self, batch: Mapping[str, Array]) -> list[Array]:
        return [np.array(output) for output in self._instance.run(batch)]  # copies: backends reuse their buffers


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # skips destructors of the libraries, which may crash
