"""Runs one compilation in a process of its own, and always ends that process and all that it started.

CompileTask ─> compile_process (own group, lowest priority, bounded time, memory and files) ─> CompileOutcome
Whatever happens there is an outcome: a crash, a hang or a full disk costs one candidate.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import rmtree

from pydantic import ValidationError

from millstream.plugins.compile.candidate import Compiled
from millstream.plugins.compile.child import Child, FailedError
from millstream.plugins.compile.compile_task import SCRATCH, CompileOutcome, CompileTask
from millstream.plugins.compile.targets import get_target
from millstream.services.errors import Failure, invalid
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch

#: All processes of a compilation together may use so many times what each one may: a driver waits for its compiler.
GROUP_MEMORY = 1.5
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_GPU_SEARCH = "GPU device discovery failed"


def compile_candidate(
    task: CompileTask, started: Callable[[subprocess.Popen[bytes]], None] = lambda _: None
) -> CompileOutcome:
    """Compile in a process of its own. Returns what came of it; blocks for at most `task.seconds_max` and some seconds.

    On success, `task.folder` contains the files that the outcome names; otherwise it is empty.

    Args:
        task: what to compile; its folder must be empty.
        started: called with the process, which may be killed at any time by its process group.
    """
    outcome = _run(task, started)
    try:
        if outcome.compiled is not None:
            size_bytes = check_files(task, outcome.compiled)
            outcome = outcome.model_copy(update={"size_bytes": size_bytes})
    except (Failure, OSError) as error:
        why = error.message if isinstance(error, Failure) else f"its files cannot be read: {error.strerror}"
        outcome = outcome.model_copy(update={"compiled": None, "error": why})
    _remove_others(task.folder, outcome.compiled.files if outcome.compiled is not None else ())
    return outcome


def _run(task: CompileTask, started: Callable[[subprocess.Popen[bytes]], None]) -> CompileOutcome:
    began = time.monotonic()
    try:
        child = Child("millstream.plugins.compile.compile_process", partial(_watch, task), _environment(task))
    except OSError as error:
        return CompileOutcome(error=f"its process cannot be started: {error.strerror}")
    try:
        started(child.process)
        outcome = CompileOutcome.model_validate_json(child.ask(task, task.seconds_max, last=True))
    except ValidationError:
        outcome = CompileOutcome(error="its process reported nothing that can be read")
    except (FailedError, TimeoutError) as error:
        outcome = CompileOutcome(error=str(error))
        if isinstance(error, TimeoutError) or child.process.returncode == -signal.SIGXCPU:
            outcome = CompileOutcome(error=f"it took longer than {task.seconds_max:.4g} s", seconds=task.seconds_max)
    finally:
        child.close()
    outcome = _with_possible_seconds(outcome, time.monotonic() - began)
    return outcome.model_copy(update={"stderr": _readable(child.stderr)})


def _readable(errors: str) -> str:
    """Return what was printed, without colours and ONNX Runtime's search for GPUs, which the sandbox forbids."""
    lines = _COLOURS.sub("", errors).splitlines(keepends=True)
    return "".join(line for line in lines if _GPU_SEARCH not in line)


def _watch(task: CompileTask, pid: int) -> GroupWatch:
    try:
        alone = not get_target(task.candidate.target).programs()
    except Failure:  # the process says so
        alone = True
    folder = FolderWatch(task.folder, task.written_bytes, included="")
    return GroupWatch(pid, folder, int(task.memory_bytes * GROUP_MEMORY), alone=alone)


def _with_possible_seconds(outcome: CompileOutcome, elapsed_s: float) -> CompileOutcome:
    """Return the outcome; what no compilation can have taken is replaced: reports show it."""
    if 0 <= outcome.seconds <= elapsed_s:
        return outcome
    return outcome.model_copy(update={"seconds": elapsed_s})


def check_files(task: CompileTask, compiled: Compiled) -> int:
    """Return the bytes of the files that were written.

    The compiler may have been taken over by the model that it read: nothing of its report is believed unchecked.
    Raises Failure(INVALID), OSError.
    """
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
    return {**folders, **threads, "MALLOC_ARENA_MAX": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
