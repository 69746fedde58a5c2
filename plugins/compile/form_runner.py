"""Compiles a candidate, or loads a form and measures it, in a process of its own that ends with all that it started.

CompileTask ─> form_process ─> CompileOutcome             Opening ─> form_process ─> Said ── TimeRuns | Answer ─> Said
Whatever happens there costs one candidate. Replies are checked: the process runs a compiler that read an untrusted
model, or the code that this compiler made.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from millstream.plugins.compile.candidate import SCRATCH, Compiled, CompileOutcome, CompileTask, Flags
from millstream.plugins.compile.race.bounds import Extreme
from millstream.plugins.compile.race.report import STDERR_CHARACTERS_MAX
from millstream.plugins.compile.targets import get_target
from millstream.services.environment import library_environment
from millstream.services.errors import Failure, invalid
from millstream.services.model.agreement import Array
from millstream.services.model.datatypes import decode_elements, encode_elements
from millstream.services.model.samples import read_npz
from millstream.services.model.signature import Signature
from millstream.services.sandbox.child import ChildFailedError, ChildProcess
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch

MODULE = "millstream.plugins.compile.worker.form_process"
#: All processes of a compilation together may use so many times what each one may: a driver waits for its compiler.
GROUP_MEMORY = 1.5
TIMES_MAX = 1000  # runs of one block
ANSWER_BYTES_MAX = 1 << 30  # of all outputs of one Answer
ANSWER_ARRAYS_MAX = 4096
#: that a measuring process may write: the outputs of an Answer, and what its library compiles
WRITTEN_BYTES_MAX = ANSWER_BYTES_MAX + (512 << 20)
#: A hard limit above that on the memory that a load and its runs find, which follows what is used.
MEMORY_SPARE = 1.5
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_GPU_SEARCH = "GPU device discovery failed"


class Opening(BaseModel):
    """What a measuring process loads.

    Args:
        inputs: an .npz of samples.
        options: of the load.
        memory_bytes: that the process may use; 0: no limit.
        folder: the only one that the process may write to; that of `inputs` it may read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    path: Path
    signature: Signature
    device: str
    threads: int
    inputs: Path
    folder: Path
    options: Flags = {}
    memory_bytes: int = 0

    @property
    def starts_programs(self) -> bool:
        """Whether the load compiles, in a process of its own: IREE does so with what was not compiled for it."""
        return self.backend == "iree" and self.path.suffix != ".json"


class TimeRuns(BaseModel):
    """Measure runs of `rows` rows for `seconds`, at least one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    seconds: float


class Answer(BaseModel):
    """Run samples and write the outputs.

    Args:
        inputs: an .npz of samples; a version that batches runs all its rows.
        rows: of each run; the last one may have fewer.
        extreme: an input and the number that it gets in a single run of `rows` of the samples ("": the rows are equal,
            no more); None: all samples run as they are.
        to: the file to write, by `write_outputs`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Path
    rows: int
    to: Path
    extreme: Extreme | None = None


class Said(BaseModel):
    """The reply of a measuring process. `error`: why it failed; empty: it did not. `times_s`: of the runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str = ""
    times_s: tuple[float, ...] = Field((), max_length=TIMES_MAX)


def compile_candidate(task: CompileTask, started: Callable[[ChildProcess], None] = lambda _: None) -> CompileOutcome:
    """Compile in a process of its own. Returns what came of it; blocks for at most `task.seconds_max` and some seconds.

    On success, `task.folder` contains the files that the outcome names; otherwise it is empty.

    Args:
        task: what to compile; its folder must be empty.
        started: called with the process, which may be killed at any time by its process group.
    """
    began = time.monotonic()
    outcome, stderr = _compiled(task, started)
    try:
        if outcome.compiled is not None:
            outcome = outcome.model_copy(update={"size_bytes": check_files(task, outcome.compiled)})
    except (Failure, OSError) as error:
        why = error.message if isinstance(error, Failure) else f"its files cannot be read: {error.strerror}"
        outcome = CompileOutcome(error=why)
    _remove_others(task.folder, outcome.compiled.files if outcome.compiled is not None else ())
    # Without colours and ONNX Runtime's search for GPUs, which the sandbox forbids.
    lines = [line for line in _COLOURS.sub("", stderr).splitlines(keepends=True) if _GPU_SEARCH not in line]
    seconds = round(time.monotonic() - began, 3)
    return outcome.model_copy(update={"seconds": seconds, "stderr": "".join(lines)[-STDERR_CHARACTERS_MAX:]})


def _compiled(task: CompileTask, started: Callable[[ChildProcess], None]) -> tuple[CompileOutcome, str]:
    """Return what the process reports, and what it wrote to its standard error."""
    try:
        child = ChildProcess(MODULE, environment=_environment(task), watch_of=partial(_compile_watch, task))
    except OSError as error:
        return CompileOutcome(error=f"its process cannot be started: {error.strerror}"), ""
    try:
        started(child)
        outcome = CompileOutcome.model_validate_json(child.ask(task.model_dump_json().encode(), task.seconds_max))
    except ValidationError:
        outcome = CompileOutcome(error="its process reported nothing that can be read")
    except (ChildFailedError, TimeoutError) as error:
        late = isinstance(error, TimeoutError) or child.status == -signal.SIGXCPU
        outcome = CompileOutcome(error=f"it took longer than {task.seconds_max:.4g} s" if late else str(error))
    finally:
        child.close()
    return outcome, child.stderr


def check_files(task: CompileTask, compiled: Compiled) -> int:
    """Return the bytes of the files that were written. Raises Failure(INVALID), OSError."""
    target = get_target(task.candidate.target)
    if compiled.backend != target.backend:
        raise invalid(f"it reports the backend {compiled.backend}, and {target.name} is for {target.backend}")
    total = 0
    for name in compiled.files:
        path = task.folder / name
        if Path(name).name != name or name.startswith(".") or path.is_symlink() or not path.is_file():
            raise invalid(f"it reports {name!r}, which is not a file in its folder")
        total += path.stat().st_size
    if total > task.written_bytes:
        raise invalid(f"it wrote {total} bytes, more than the {task.written_bytes} that a compilation may write")
    return total


def _remove_others(folder: Path, files: tuple[str, ...]) -> None:
    """Delete everything in the folder but these files."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name in files:
                continue
            if path.is_dir() and not path.is_symlink():
                rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _environment(task: CompileTask) -> dict[str, str]:
    """Return what libraries need; they cache in the folder for temporary files."""
    scratch = str(task.folder / SCRATCH)
    folders = dict.fromkeys(("TMPDIR", "HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR"), scratch)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(max(1, task.subject.threads)))
    return library_environment({**folders, **threads, "MALLOC_ARENA_MAX": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"})


def _compile_watch(task: CompileTask, pid: int) -> GroupWatch:
    try:
        alone = not get_target(task.candidate.target).programs()
    except Failure:  # the process says so
        alone = True
    folder = FolderWatch(task.folder, task.written_bytes, included="")
    return GroupWatch(pid, folder, int(task.memory_bytes * GROUP_MEMORY), alone=alone)


class Measuring:
    """A process that loaded one form, and runs what it is told. Not for several threads.

    Args:
        opening: what it loads.
        seconds_max: for the load.

    Raises ChildFailedError with the reason if it cannot load, TimeoutError if that takes too long; it is gone then.
    """

    def __init__(self, opening: Opening, seconds_max: float) -> None:
        watch = partial(_measuring_watch, opening)
        self._child = ChildProcess(MODULE, environment=library_environment({}), watch_of=watch)
        try:
            self._ask(opening, seconds_max)
        except BaseException as error:
            self.close()
            if isinstance(error, ChildFailedError):
                error.stderr = self.stderr
            raise

    @property
    def stderr(self) -> str:
        """The end of what it wrote to its standard error."""
        return self._child.stderr[-STDERR_CHARACTERS_MAX:]

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._child.status is not None

    def close(self) -> None:
        """Kill the process and those that it started."""
        self._child.close()

    def times(self, rows: int, seconds: float, seconds_max: float) -> tuple[float, ...]:
        """Return the seconds of runs in a block of about `seconds`. Raises ChildFailedError, TimeoutError."""
        said = self._ask(TimeRuns(rows=rows, seconds=seconds), seconds_max)
        if not said.times_s or min(said.times_s) <= 0:
            self.close()
            raise ChildFailedError("its process reported no times")
        return said.times_s

    def answer(self, command: Answer, seconds_max: float) -> list[Array]:
        """Have samples run; return the outputs. Raises ChildFailedError, TimeoutError, and as `read_outputs` does."""
        try:
            self._ask(command, seconds_max)
            return read_outputs(command.to)
        finally:
            command.to.unlink(missing_ok=True)

    def _ask(self, message: BaseModel, seconds_max: float) -> Said:
        """Send a message and return the reply. After an error of the process itself, it is gone."""
        try:
            said = Said.model_validate_json(self._child.ask(message.model_dump_json().encode(), seconds_max))
        except ValidationError:
            self.close()
            raise ChildFailedError("its process replied nothing that can be read") from None
        if said.error:
            raise ChildFailedError(" ".join(said.error.split()))
        return said


def _measuring_watch(opening: Opening, pid: int) -> GroupWatch:
    folder = FolderWatch(opening.folder, WRITTEN_BYTES_MAX, included="")
    memory_bytes = int(opening.memory_bytes * MEMORY_SPARE) or sys.maxsize
    return GroupWatch(pid, folder, memory_bytes, alone=not opening.starts_programs)


def write_outputs(path: Path, outputs: Sequence[Array]) -> None:
    """Write numbers as they are, text as its raw form with its shape, so that no pickle is needed. Raises OSError."""
    arrays: dict[str, Array] = {}
    for at, array in enumerate(outputs):
        if array.dtype == object:
            raw = encode_elements(array.ravel().tolist())
            arrays[f"text{at}"] = np.frombuffer(raw, np.uint8)
            arrays[f"shape{at}"] = np.array(array.shape, np.int64)
        else:
            arrays[f"array{at}"] = array
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_outputs(path: Path) -> list[Array]:
    """Return outputs. Raises OSError, ValueError: another process wrote the file, which may be anything."""
    if path.is_symlink() or not path.is_file():
        raise ValueError("there are none")
    arrays = read_npz(path, ANSWER_BYTES_MAX, ANSWER_ARRAYS_MAX)
    outputs: list[Array] = []
    for at in range(len(arrays)):
        if f"array{at}" in arrays:
            outputs.append(arrays[f"array{at}"])
        elif f"text{at}" in arrays and f"shape{at}" in arrays:
            elements = decode_elements(arrays[f"text{at}"].tobytes())
            text = np.empty(len(elements), dtype=object)
            text[:] = elements
            outputs.append(text.reshape([int(size) for size in arrays[f"shape{at}"].ravel()]))
    return outputs
