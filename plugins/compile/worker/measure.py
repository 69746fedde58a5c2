"""python -m millstream.plugins.compile.worker.measure: load one candidate, or the baseline, and run it on command.

stdin: Opening, then Commands ─> run, time ─> stdout: Said, a line each
A crash, a hang or hunger for memory ends this process and loses this candidate alone. Times do not include the pipe.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from millstream.plugins.compile.race.bounds import Extreme, extreme_call, extreme_rows
from millstream.plugins.compile.race.samples import rows_of
from millstream.plugins.compile.targets import get_target
from millstream.plugins.compile.worker.messages import (
    ANSWER_BYTES_MAX,
    MEMORY_SPARE,
    TIMES_MAX,
    WRITTEN_BYTES_MAX,
    Answer,
    Command,
    Opening,
    Said,
    TimeRuns,
)
from millstream.plugins.compile.worker.outputs import write_outputs
from millstream.services.errors import Failure
from millstream.services.model.samples import read_inputs
from millstream.services.sandbox.confine import Limits, begin, confine
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array, Backend, Instance
from millstream.workers.backends.engine_parts import Reshaped
from millstream.workers.models.memory_limit import MemoryLimit, prefer_for_oom_kill

ERROR_CHARACTERS_MAX = 1000
_CPU_S_MAX = 1 << 30  # the driver ends one that takes long
WARM_UPS = 2  # runs of a size before its first block


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
            write_outputs(command.to, self._run(self._extreme(inputs, command.extreme, command.rows)))
            return Said()
        if not self._signature.batching:
            write_outputs(command.to, self._run(inputs))
            return Said()
        count = len(next(iter(inputs.values())))
        runs = [
            self._run(self._batch(inputs, min(command.rows, count - first), first))
            for first in range(0, count, command.rows)
        ]
        joined = [np.concatenate(parts) for parts in zip(*runs, strict=True)]
        if sum(array.nbytes for array in joined) > ANSWER_BYTES_MAX:
            return Said(error="its outputs are too large to compare")
        write_outputs(command.to, joined)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m millstream.plugins.compile.worker.measure",
        description="Run one candidate of a race on command.",
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the driver")
    begin(parser.parse_args().parent)
    prefer_for_oom_kill()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print write to standard error
    opening = Opening.model_validate_json(sys.stdin.readline())
    backend = get_backend(opening.backend)  # looks plug-ins up, in files that the sandbox hides
    _confine(opening)
    limit = MemoryLimit(opening.memory_bytes)

    def say(said: Said) -> None:
        print(said.model_dump_json(), file=output, flush=True)

    try:
        measurements = Measurements(opening, backend)
    except BaseException as error:
        say(Said(error=_why(error)))
        return
    limit.follow()
    say(Said())
    for line in sys.stdin:
        command = Command.model_validate_json(line)
        try:
            if command.time is not None:
                say(measurements.time(command.time))
            elif command.answer is not None:
                say(measurements.answer(command.answer))
        except Exception as error:
            say(Said(error=_why(error)))


def _confine(opening: Opening) -> None:
    """Restrict this process to what it measures, before it loads any of it. Raises OSError."""
    model, folder = opening.path.absolute(), opening.folder.resolve()
    tempfile.tempdir = str(folder)
    # The served file may be a link to another folder; its weights are beside it.
    reads = [model.parent, model.parent.resolve(), model.resolve(), opening.inputs.parent.resolve()]
    programs = [Path(sys.executable).resolve(), *get_target("iree").programs()] if opening.starts_programs else []
    memory_bytes = int(opening.memory_bytes * MEMORY_SPARE) or resource.RLIM_INFINITY
    limits = Limits(memory_bytes, _CPU_S_MAX, WRITTEN_BYTES_MAX, reserved_free=True)
    confine(reads, [folder], programs, limits=limits, accelerator=opening.device != "cpu")


def _why(error: BaseException) -> str:
    if isinstance(error, Failure):
        return error.message
    if isinstance(error, MemoryError):
        return "it found no memory"
    sys.excepthook(type(error), error, error.__traceback__)
    return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # skips destructors of the libraries, which may crash
