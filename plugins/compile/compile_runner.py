"""Runs one compilation in a process of its own, and always ends that process and all that it started.

CompileTask ─> compile_process (own session, lowest priority, bounded time, memory and files) ─> CompileOutcome
Whatever happens there is an outcome: a crash, a hang or a full disk costs one candidate.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import IO

from pydantic import ValidationError

from millstream.plugins.compile.candidate import Compiled
from millstream.plugins.compile.compile_task import (
    OUTCOME_BYTES_MAX,
    SCRATCH,
    STDERR_BYTES_KEPT,
    CompileOutcome,
    CompileTask,
)
from millstream.plugins.compile.targets import get_target
from millstream.services.crashes.exit_status import describe_exit
from millstream.services.environment import library_environment
from millstream.services.errors import Failure, invalid
from millstream.services.sandbox.folder_watch import WATCH_S, FolderWatch
from millstream.services.sandbox.group_watch import GroupWatch

#: All processes of a compilation together may use so many times what each one may: a driver waits for its compiler.
GROUP_MEMORY = 1.5
_READERS_S_MAX = 5.0  # for what ended processes have printed to be read
_CHUNK_BYTES = 1 << 16
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
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream.plugins.compile.compile_process", "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(task),
            start_new_session=True,
        )
    except OSError as error:
        return CompileOutcome(error=f"its process cannot be started: {error.strerror}")
    kept: dict[str, bytes] = {}
    assert process.stdin
    assert process.stdout
    assert process.stderr
    readers = [
        threading.Thread(target=_read_beginning, args=(process.stdout, kept), daemon=True),
        threading.Thread(target=_read_end, args=(process.stderr, kept), daemon=True),
    ]
    late, exceeded, began = False, "", time.monotonic()
    try:
        started(process)
        for reader in readers:
            reader.start()
        with suppress(OSError):  # it has ended already
            process.stdin.write(task.model_dump_json().encode())
            process.stdin.close()
        late, exceeded = _followed(process, task)
    finally:
        _end(process)
    for reader, stream in zip(readers, (process.stdout, process.stderr), strict=True):
        reader.join(_READERS_S_MAX)
        if not reader.is_alive():
            stream.close()
    outcome = CompileOutcome(error=f"it was ended: {exceeded}") if exceeded else None
    outcome = outcome or _outcome(task, kept.get("output", b""), process.returncode, late=late)
    outcome = _with_possible_seconds(outcome, time.monotonic() - began)
    return outcome.model_copy(update={"stderr": _readable(kept.get("errors", b""))})


def _readable(errors: bytes) -> str:
    """Return what was printed, without colours and ONNX Runtime's search for GPUs, which the sandbox forbids."""
    lines = _COLOURS.sub("", errors.decode(errors="replace")).splitlines(keepends=True)
    return "".join(line for line in lines if _GPU_SEARCH not in line)


def _followed(process: subprocess.Popen[bytes], task: CompileTask) -> tuple[bool, str]:
    """Wait for the end of the process. Returns whether its time is over, and which limit of its group was exceeded.

    The process stays a zombie, so that no other one gets its number before its group is killed.
    """
    ends_at = time.monotonic() + task.seconds_max
    watch = _watch(process, task)
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while (left_s := ends_at - time.monotonic()) > 0:
            if poll.poll(min(left_s, WATCH_S) * 1000):
                return False, ""
            if exceeded := watch.measure():
                return False, exceeded
        return not poll.poll(0), ""
    finally:
        os.close(descriptor)


def _watch(process: subprocess.Popen[bytes], task: CompileTask) -> GroupWatch:
    try:
        alone = not get_target(task.candidate.target).programs()
    except Failure:  # the process says so
        alone = True
    folder = FolderWatch(task.folder, task.written_bytes, included="")
    return GroupWatch(process.pid, folder, int(task.memory_bytes * GROUP_MEMORY), alone=alone)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(task: CompileTask, output: bytes, status: int, *, late: bool) -> CompileOutcome:
    if late or status == -signal.SIGXCPU:
        error = f"it took longer than {task.seconds_max:.4g} s"
        return CompileOutcome(error=error, seconds=task.seconds_max, late=True)
    if status:
        return CompileOutcome(error=f"its process {describe_exit(status)}")
    try:
        return CompileOutcome.model_validate_json(output).model_copy(update={"late": False})
    except ValidationError:
        return CompileOutcome(error="its process reported nothing that can be read")


def _with_possible_seconds(outcome: CompileOutcome, elapsed_s: float) -> CompileOutcome:
    """Return the outcome; what no compilation can have taken is replaced, since later races rely on it."""
    if outcome.late or 0 <= outcome.seconds <= elapsed_s:
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


def _read_beginning(stream: IO[bytes], kept: dict[str, bytes]) -> None:
    """Keep the beginning of the stream; the rest is read and dropped, so that the writer never blocks."""
    found = bytearray()
    with suppress(OSError, ValueError):
        while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
            found += chunk[: OUTCOME_BYTES_MAX - len(found)]
    kept["output"] = bytes(found)


def _read_end(stream: IO[bytes], kept: dict[str, bytes]) -> None:
    """Keep the end of the stream, at most STDERR_BYTES_KEPT bytes."""
    found = b""
    with suppress(OSError, ValueError):
        while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
            found = (found + chunk)[-STDERR_BYTES_KEPT:]
    kept["errors"] = found


def _environment(task: CompileTask) -> dict[str, str]:
    """Return what libraries need; they cache in the folder for temporary files."""
    scratch = str(task.folder / SCRATCH)
    folders = dict.fromkeys(("TMPDIR", "HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR"), scratch)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(max(1, task.subject.threads)))
    return library_environment({**folders, **threads, "MALLOC_ARENA_MAX": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"})
