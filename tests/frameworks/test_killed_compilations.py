"""A compiler's own programs end with what asked for the compilation, where that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.plugins.compile.candidate import CompileTask, Subject
from millstream.plugins.compile.targets import get_target
from millstream.services.model.signature import Signature, TensorSpec
from tests.frameworks.test_aotinductor import subject as program
from tests.kit import models
from tests.kit.process_groups import members
from tests.kit.wait import wait_for_none, wait_until

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

#: Compiles what standard input says, and says the number of the compilation's process, which leads a group.
CALLER = """
import sys
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.compile.candidate import CompileTask
task = CompileTask.model_validate_json(sys.stdin.read())
print(compile_candidate(task, lambda process: print(process.pid, flush=True)), flush=True)
"""
SQUEEZENET = Signature(
    inputs=(TensorSpec(name="data_0", datatype="FP32", shape=(-1, 3, 224, 224)),),
    outputs=(TensorSpec(name="scores", datatype="FP32", shape=(-1, 1000)),),
    batching=True,
)


def network(folder: Path) -> Subject:
    """Return an ONNX model that IREE compiles for many seconds."""
    return Subject(path=models.squeezenet(folder / "model.onnx"), source_format="onnx", signature=SQUEEZENET)


def stop_program(group: int, name: str) -> bool:
    """Stop the programs of that name in a group, which then do not end by themselves; return whether there is one."""
    found = False
    for pid, running in members(group).items():
        if running == name:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                found = True
    return found


@pytest.mark.parametrize(
    ("target", "make", "compiler"), [("iree", network, "iree-compile"), ("aotinductor", program, "cc1plus")]
)
def test_a_compiler_ends_with_a_caller_that_is_killed(target, make, compiler, tmp_path):
    of = make(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    candidate = get_target(target).candidates(of)[0]
    task = CompileTask(subject=of, candidate=candidate, folder=folder, seconds_max=500, low_priority=False)
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert caller.stdin
    assert caller.stdout
    with caller:
        caller.stdin.write(task.model_dump_json().encode())
        caller.stdin.close()
        group = int(caller.stdout.readline())
        wait_until(lambda: stop_program(group, compiler), 300, what=f"{compiler} runs")
        caller.kill()
        wait_for_none(lambda: members(group))
