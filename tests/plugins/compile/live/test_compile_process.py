"""A compilation that is killed, hangs, finds no memory or lies is an error, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.plugins.compile.candidate import Candidate, Compiled, CompileOutcome, CompileTask, Subject
from millstream.plugins.compile.form_runner import check_files, compile_candidate
from millstream.plugins.compile.targets import get_target
from millstream.services.errors import Failure
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.sandbox import landlock, seccomp
from millstream.services.sandbox.child import ChildProcess
from tests.kit import models
from tests.kit.wait import PAUSE_S_MIN

COMPILE_S_MAX = 300.0  # a busy machine takes a minute for it
ROWS = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 4)),),
    batching=True,
)


@pytest.fixture
def task(tmp_path: Path) -> CompileTask:
    folder = tmp_path / "folder"
    folder.mkdir()
    subject = Subject(path=models.mlp(tmp_path / "mlp.onnx"), source_format="onnx", signature=ROWS)
    candidate = get_target("onnxruntime").candidates(subject)[0]
    return CompileTask(
        subject=subject, candidate=candidate, folder=folder, seconds_max=COMPILE_S_MAX, low_priority=False
    )


def failed(outcome: CompileOutcome, folder: Path) -> str:
    assert outcome.compiled is None
    assert list(folder.iterdir()) == []
    return outcome.error


def test_it_compiles(task):
    outcome = compile_candidate(task)
    assert outcome.compiled is not None, outcome
    assert (outcome.error, outcome.compiled.options) == ("", task.candidate.flags)
    assert list(task.folder.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_a_compilation_that_dies_is_an_error(task, number):
    outcome = compile_candidate(task, lambda process: os.kill(process.pid, number))
    assert failed(outcome, task.folder) == f"its process was ended by {number.name}"


def test_a_compilation_that_hangs_is_ended(task):
    (task.folder / "half-written").touch()
    late = task.model_copy(update={"seconds_max": 0.5})
    outcome = compile_candidate(late, lambda process: os.kill(process.pid, signal.SIGSTOP))
    assert failed(outcome, task.folder) == "it took longer than 0.5 s"


def test_a_compilation_whose_files_take_too_much_together_is_ended_at_once(task):
    """Each of them may have the size of all: RLIMIT_FSIZE does not bound their sum."""

    def write(process: ChildProcess) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        for name in "abc":
            (task.folder / name).write_bytes(bytes(1 << 20))

    outcome = compile_candidate(task.model_copy(update={"written_bytes": 2 << 20}), write)
    assert failed(outcome, task.folder) == "it was ended: its files take more than 2 MiB"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate": Candidate(target="glow", lossy=False)}, "unknown target 'glow'"),
        ({"candidate": Candidate(target="onnxruntime", flags={"threads": 99}, lossy=False)}, "is not a candidate"),
    ],
)
def test_what_no_target_proposed_is_refused(task, change, message):
    assert message in failed(compile_candidate(task.model_copy(update=change)), task.folder)


def test_a_model_that_is_gone_is_an_error(task):
    task.subject.path.unlink()
    assert failed(compile_candidate(task), task.folder) == "mlp.onnx: there is no such file"


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ({"backend": "triton", "files": ("form",)}, "it reports the backend triton"),
        ({"files": ("link",)}, "not a file in its folder"),
        ({"files": ("../mlp.onnx",)}, "not a file in its folder"),
        ({"files": (".scratch",)}, "not a file in its folder"),
        ({"files": ("gone",)}, "not a file in its folder"),
        ({"files": ("form",) * 3}, "more than the 8 that a compilation may write"),
    ],
)
def test_the_report_of_a_process_that_was_taken_over_is_not_believed(task, reported, message):
    (task.folder / "form").write_bytes(b"1234")
    (task.folder / "link").symlink_to(task.subject.path)
    made = Compiled(**{"backend": "onnxruntime", "runtime": "any", **reported})
    with pytest.raises(Failure, match=message):
        check_files(task.model_copy(update={"written_bytes": 8}), made)


@pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")
def test_only_the_programs_of_a_target_start_and_they_stay_confined(tmp_path):
    script = """
import subprocess, sys
from pathlib import Path
from millstream.services.sandbox.confine import confine
confine((), (Path(sys.argv[1]),), (Path("/usr/bin/cat").resolve(),))
for path in ("/dev/null", "/etc/passwd"):
    print(subprocess.run(["/usr/bin/cat", path]).returncode, flush=True)
try:
    subprocess.run(["/usr/bin/env"])
except PermissionError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["0", "1", "refused"], done.stderr


@pytest.mark.skipif(not seccomp.is_supported(), reason="this kernel or machine takes no seccomp filter")
def test_what_a_compiler_starts_cannot_leave_the_group_that_is_killed(tmp_path):
    script = """
import os, sys
from pathlib import Path
from millstream.services.sandbox.confine import confine
confine((), (Path(sys.argv[1]),), (Path("/usr/bin/cat").resolve(),))
for escape in (os.setsid, lambda: os.setpgid(0, 0)):
    child = os.fork()
    if child == 0:
        try:
            escape()
            os._exit(1)
        except PermissionError:
            os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["0", "0"], done.stderr


@pytest.mark.parametrize(("low_priority", "lowered"), [(True, True), (False, False)])
def test_a_compilation_that_calls_wait_for_has_the_priority_of_its_caller(task, low_priority, lowered):
    """At the lowest priority a busy machine lets it run into its time limit."""
    policies = set()

    def follow(process: ChildProcess) -> None:
        with suppress(ProcessLookupError):
            while True:
                policies.add(os.sched_getscheduler(process.pid))
                time.sleep(PAUSE_S_MIN)

    threads = []

    def started(process: ChildProcess) -> None:
        threads.append(threading.Thread(target=follow, args=(process,), daemon=True))
        threads[0].start()

    [candidate, *_] = get_target("onnxruntime-int8-dynamic").candidates(task.subject)  # it works for a second
    outcome = compile_candidate(task.model_copy(update={"low_priority": low_priority, "candidate": candidate}), started)
    assert outcome.compiled is not None, outcome
    threads[0].join(120)
    assert (os.SCHED_IDLE in policies) == lowered
