"""Tries a function at its upload, in a process like those of workers, and writes the document that they load.

start ─> its hints as a Signature ─> one row of generated inputs ─> rows alone and together ─> FunctionDocument
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from millstream.plugins.children.arrays import Array, to_array, to_tensor
from millstream.plugins.children.process import EndedError, InstanceProcess, InstanceProcesses, RunError
from millstream.plugins.functions.document import (
    DOCUMENT,
    FORMAT,
    Adapter,
    FunctionDocument,
    RunsIn,
    ServedFile,
    program_of,
)
from millstream.plugins.functions.function_packages import asks_network, lock, python_of
from millstream.plugins.functions.importer import NAME
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.importers import SOURCE
from millstream.services.ingest.report import Converted, one_line
from millstream.services.model.manifest import Batching, TrialInputs
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.model.warmup_inputs import FILLS, VARIABLE_SIZES, has_variable_dims, make_inputs
from millstream.services.sandbox.child import in_its_thread
from millstream.services.settings import Settings

_ROWS = 3  # of the trial that compares rows alone and together
_RTOL = 1e-3


class Tried(NamedTuple):
    """What is tried.

    Args:
        path: of the file, below the folder of an upload.
        adapter: what makes a function of it, as in FunctionDocument.
        importer: its name.
        requirements: of its packages; None: as the file and what is beside it declare.
        beneath: the packages of the server are there beside them.
        notes: for its owner.
    """

    path: Path
    adapter: Adapter = ""
    importer: str = NAME
    requirements: Sequence[str] | None = None
    beneath: bool = False
    notes: tuple[str, ...] = ()


async def tried(folder: Path, asked: Tried, settings: Settings) -> Converted:
    """Try the function in a file below the folder of an upload, and write its document.

    Raises Failure: INVALID with what the owner can do, UNAVAILABLE if no process can be started.
    """
    children = InstanceProcesses()
    deadline = CheckDeadline(settings.check_s_max)
    try:
        return await in_its_thread(partial(_tried, children, folder, asked, settings, deadline), deadline.end)
    finally:
        children.close()


class CheckDeadline:
    """Ends the process of a trial, when its time is over or its caller is gone."""

    def __init__(self, seconds_max: float) -> None:
        self.seconds_max = seconds_max
        self.child: InstanceProcess | None = None

    def end(self) -> None:
        if self.child is not None:
            self.child.kill("its check was ended")


def _tried(
    children: InstanceProcesses, folder: Path, asked: Tried, settings: Settings, deadline: CheckDeadline
) -> Converted:
    path = asked.path
    network = not asked.adapter and asks_network(path)
    lock_name = lock(folder, path, settings.home, settings.import_s_max, asked.requirements)
    python = python_of(folder, lock_name, path.parent, settings.home, settings.import_s_max)
    program = program_of(
        folder / SOURCE,
        ServedFile(str(path.relative_to(folder / SOURCE)), asked.adapter, bool(lock_name and asked.beneath), network),
        f"check of {path.name}",
        RunsIn(python, settings.check_memory_bytes_max, 1, settings.unconfined_imports == "accept"),
    )
    try:
        child = deadline.child = children.start(program)
    except OSError as error:
        raise Failure(Code.UNAVAILABLE, f"the check cannot be started: {error.strerror}", retry_after_s=5) from error
    timer = started_timer(child, deadline.seconds_max)
    try:
        said = child.load()
        document = _document(child, folder, asked, said).model_copy(update={"lock": lock_name, "network": network})
    except (RunError, EndedError) as error:
        raise invalid(one_line(str(error))) from error
    except (ValidationError, KeyError, TypeError) as error:
        raise invalid(f"{path.name} describes itself in a way that cannot be read") from error
    finally:
        timer.cancel()
        child.close()
    (folder / DOCUMENT).parent.mkdir(exist_ok=True)
    (folder / DOCUMENT).write_text(document.model_dump_json(), encoding="utf-8")
    below = sorted(one for one in (folder / SOURCE).rglob("*") if one.is_file() and not one.is_symlink())
    return Converted(
        served=DOCUMENT,
        source_format=FORMAT,
        files=(*(str(one.relative_to(folder)) for one in below), *([lock_name] if lock_name else [])),
        samples=(),
        importer=asked.importer,
        producer=document.producer,
        notes=asked.notes,
        rtol=0,
        atol=0,
    )


def started_timer(child: InstanceProcess, seconds_max: float) -> threading.Timer:
    """Return a timer that ends a process whose check takes too long."""
    why = f"the check took longer than {seconds_max:g} s (MILLSTREAM_CHECK_S_MAX sets the limit)"
    timer = threading.Timer(seconds_max, child.kill, [why])
    timer.daemon = True
    timer.start()
    return timer


def _document(child: InstanceProcess, folder: Path, asked: Tried, said: Mapping[str, Any]) -> FunctionDocument:
    """Return what is served, from what the process says of itself, after trial runs."""
    signature = Signature(
        inputs=tuple(TensorSpec.model_validate(one) for one in said["inputs"]),
        outputs=tuple(TensorSpec.model_validate(one) for one in said["outputs"]),
        batching=bool(said["batches"]),
    )
    streams = int(said["streams"])
    if streams:
        child.begin_streams()
    trial, why = _one_row(child, signature, said["kinds"])
    unknown = f"No generated input runs, so only requests will show whether it works: {why}."
    return FunctionDocument(
        file=str(asked.path.relative_to(folder)),
        adapter=asked.adapter,
        importer=asked.importer,
        columns=tuple(said["columns"]),
        signature=signature,
        streams=streams,
        kinds=said["kinds"],
        batching=_batching(child, signature, trial),
        trial=trial,
        notes=() if trial is not None else (one_line(unknown),),
        producer=f"Python {platform.python_version()}",
    )


def _batching(child: InstanceProcess, signature: Signature, trial: TrialInputs | None) -> Batching:
    if not signature.batching:
        why = "it answers in parts" if child.streams else "the function takes no rows"
        return Batching(decided="off", reason=why)
    differs = "" if trial is None else _compared(child, signature, trial)
    if differs:
        return Batching(decided="unmerged", reason=one_line(f"rows answer differently together than alone: {differs}"))
    return Batching(decided="requested", reason="the function takes rows, or is called for each")


def _one_row(child: InstanceProcess, signature: Signature, kinds: Mapping[str, str]) -> tuple[TrialInputs | None, str]:
    """Return generated inputs of one row that run; None and why none does."""
    if any(kinds.get(spec.name) not in {"text", "numbers"} for spec in signature.inputs if not spec.optional):
        return None, "its inputs are not of a kind that can be generated"
    why = ""
    for size in VARIABLE_SIZES if has_variable_dims(signature) else (1,):
        for fill in FILLS:
            try:
                _run(child, signature, make_inputs(signature, 1, size, fill))
            except RunError as error:
                why = why or str(error)
            else:
                return TrialInputs(size=size, fill=fill), ""
    return None, why


def _compared(child: InstanceProcess, signature: Signature, trial: TrialInputs) -> str:
    """Return which output of rows differs when they run together; empty: none does."""
    fills = [trial.fill, 1 - trial.fill, trial.fill][:_ROWS]
    rows = [make_inputs(signature, 1, trial.size, fill) for fill in fills]
    try:
        alone = [_run(child, signature, row) for row in rows]
    except RunError:  # the other value is none that it takes
        rows = [rows[0]] * _ROWS
        alone = [_run(child, signature, row) for row in rows]
    try:
        together = _run(child, signature, {name: np.concatenate([row[name] for row in rows]) for name in rows[0]})
    except RunError as error:
        return str(error)
    for name, found in together.items():
        expected = [one[name] for one in alone]
        if any(one.shape[1:] != found.shape[1:] for one in expected) or len(found) != len(rows):
            return f"the shape of output {name!r}"
        if not _equal(np.concatenate(expected), found):
            return f"output {name!r}"
    return ""


def _equal(expected: Array, found: Array) -> bool:
    if expected.dtype.kind == "f":
        return bool(np.allclose(expected, found, rtol=_RTOL, atol=_RTOL, equal_nan=True))
    return bool(np.array_equal(expected, found))


def _run(child: InstanceProcess, signature: Signature, inputs: Mapping[str, Array]) -> dict[str, Array]:
    datatypes = {spec.name: spec.datatype for spec in signature.inputs}
    tensors = [to_tensor(name, datatypes[name], array) for name, array in inputs.items()]
    answered = child.first_part(tensors) if child.streams else child.run(tensors).tensors
    try:
        return {tensor.name: to_array(tensor) for tensor in answered}
    except ValueError as error:
        raise RunError("model", str(error)) from error
