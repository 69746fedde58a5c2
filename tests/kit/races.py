"""Races for tests: a published version with a task, and the race's own process.

A race takes only the processor time that others leave: beside other tests its load of a library takes minutes. So the
races of tests run at the normal priority, except in the test of their priority.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from millstream.plugins.compile.race.report import RaceEvent, RaceReport, RaceTask
from millstream.services.model.manifest import ImportRecord, ModelConfig
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.repository.folder import FolderRepository
from tests.kit import models
from tests.kit.stack import Stack, descendants
from tests.kit.versions import publish_content

_AT_NORMAL_PRIORITY = """
import runpy
from millstream.services.process import threads
threads.lower_process = lambda **_: None
runpy.run_module("millstream.plugins.compile.worker", run_name="__main__", alter_sys=True)
"""


def signature(inputs: Sequence[Any], outputs: Sequence[Any], *, batching: bool = True) -> Signature:
    """Return a signature of (name, datatype, shape) triples."""
    specs = [
        tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in some)
        for some in (inputs, outputs)
    ]
    return Signature(inputs=specs[0], outputs=specs[1], batching=batching)


MLP = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])


def race_task(
    folder: Path,
    content: bytes | None = None,
    of: Signature = MLP,
    *,
    embeddings: tuple[str, ...] = (),
    **more: Any,
) -> RaceTask:
    """Return a task for a version that is published below `folder`: an MLP, or the ONNX file `content`.

    `embeddings`: outputs that are embeddings, as an importer would say.
    """
    folder.mkdir(parents=True, exist_ok=True)
    repository = FolderRepository(folder / "repository")
    content = models.mlp(folder / "mlp.onnx").read_bytes() if content is None else content
    publish_content(repository, "m", content, "onnx", of, ModelConfig())
    manifest = repository.manifest("m", 1)
    if embeddings:
        record = ImportRecord(
            importer="Hugging Face", producer="", rows=1, output=embeddings[0], difference=0, rtol=0, atol=0,
            embeddings=embeddings,
        )  # fmt: skip
        manifest = manifest.model_copy(update={"imported": record})
    fields = {"targets": ("onnxruntime",), **more}
    return RaceTask(manifest=manifest, folder=repository.folder_of(manifest), cache=folder / "cache", **fields)


def raise_priorities(stack: Stack) -> None:
    """Give the processes of a stack's races the normal priority, where that is allowed; to be called while waiting."""
    for pid in descendants(stack.process.pid):
        with suppress(OSError):
            if os.sched_getscheduler(pid) != os.SCHED_IDLE:
                continue
            Path(f"/proc/{pid}/autogroup").write_text("0")
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/task").iterdir():
                thread = int(entry.name)
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, thread, 0)


def processes(stack: Stack, module: bytes = b"millstream.plugins.compile.worker") -> list[int]:
    """Return the processes of races, or those of another module."""
    found = []
    for pid in descendants(stack.process.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if module in command:
            found.append(pid)
    return found


def kill(pids: Sequence[int]) -> None:
    """Kill processes, of which some may end because others did."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class RaceProcess:
    """`python -m millstream.plugins.compile.worker`, started with a task. `lowered`: at its own, lowest priority."""

    def __init__(self, task: RaceTask, *, lowered: bool = False) -> None:
        program = ["-m", "millstream.plugins.compile.worker"] if lowered else ["-c", _AT_NORMAL_PRIORITY]
        command = [sys.executable, "-P", *program, "--parent", str(os.getpid())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        self.process.stdin.write(task.model_dump_json())
        self.process.stdin.close()

    def until(self, stage: str) -> RaceEvent:
        """Return the first event of a stage."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = RaceEvent.model_validate_json(line)
            if event.stage in {stage, "finished"}:
                return event
        self.process.stdout.close()
        raise AssertionError(f"the race ended with {self.process.wait()} before {stage}")

    def report(self) -> RaceReport:
        """Return the report of a race that takes place."""
        event = self._last()
        assert self.process.returncode == 0, event
        assert event.report is not None
        return event.report

    def error(self) -> str:
        """Return why no race took place."""
        event = self._last()
        assert self.process.returncode == 1, event
        return event.error

    def kill(self) -> None:
        """Kill the driver alone."""
        self.process.kill()
        self._close()

    def _last(self) -> RaceEvent:
        event = self.until("finished")
        self._close()
        return event

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.wait()
        self.process.stdout.close()
