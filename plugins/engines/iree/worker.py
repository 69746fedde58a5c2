"""The IREE backend: runs what IREE compiled for this CPU, and compiles functions of JAX when it loads them.

iree.json, *.vmfb ─> loaded into IREE's runtime
model.jax ─> compiled in a confined process (the plug-in compile), then loaded
run: rows as they are, or filled up to one of the numbers of rows that were compiled

A run cannot be ended early.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from millstream.plugins.compile.candidate import CompileTask, Subject
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.engines.iree.target import Iree as IreeTarget
from millstream.plugins.engines.jax.document import FORMAT, is_export_file
from millstream.plugins.engines.worker import ProgramInstance, importing, padded
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array, Options, Stop
from millstream.workers.backends.engine_parts import CpuBackend

COMPILE_S_MAX = 300.0  # of a load of a function; beyond, the load fails


class Document(BaseModel):
    """iree.json: names in the program's order, and its files by rows; "0": variable rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    files: dict[int, str]


def _library() -> Any:
    with importing("iree.runtime", "iree", "iree"):
        import iree.runtime
    return iree.runtime


class IreeInstance(ProgramInstance):
    """A compiled model."""

    title = "IREE"

    def __init__(self, library: Any, path: Path, signature: Signature, threads: int) -> None:
        self._library = library
        self._driver = "local-sync" if threads <= 1 else "local-task"
        if threads > 1:  # of the task system, which the process has one of: effective before it starts
            library.flags.parse_flags(f"--task_topology_max_group_count={threads}")
        super().__init__(path, signature)

    def read(self, path: Path) -> tuple[Document, dict[int, Any]]:
        if path.suffix == ".json" or not is_export_file(path):
            return self._read(path)
        with tempfile.TemporaryDirectory(prefix="iree-") as folder:
            return self._read(self._compile(path, Path(folder) / "model"))

    def _read(self, path: Path) -> tuple[Document, dict[int, Any]]:
        document = self.document(Document, path)
        self.check_names(document.inputs, document.outputs)
        return document, {rows: self._load(path.parent / name) for rows, name in document.files.items()}

    def _compile(self, path: Path, folder: Path) -> Path:
        """Compile the function at `path` into the new `folder`; return the document of what was compiled."""
        folder.mkdir()
        subject = Subject(path=path.absolute(), source_format=FORMAT, signature=self._signature)
        candidate = IreeTarget().candidates(subject)[0]
        task = CompileTask(
            subject=subject, candidate=candidate, folder=folder, seconds_max=COMPILE_S_MAX, low_priority=False
        )
        outcome = compile_candidate(task)
        if outcome.compiled is None:
            raise Failure(Code.MODEL, f"IREE: {path.name}: {outcome.error}")
        return folder / outcome.compiled.files[0]

    def _load(self, path: Path) -> Any:
        runtime = self._library
        context = runtime.SystemContext(config=runtime.Config(self._driver))
        module = runtime.VmModule.copy_buffer(context.instance, path.read_bytes())
        context.add_vm_module(module)
        names = [name for name in module.function_names if name != "__init" and not name.endswith("$async")]
        return context.modules[module.name][names[0]]

    def call(self, program: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        document, functions = program
        arrays = [np.ascontiguousarray(inputs[name]).reshape(inputs[name].shape) for name in document.inputs]
        found = _invoke(functions[0], arrays) if 0 in functions else _run_rows(functions, arrays)
        return dict(zip(document.outputs, found, strict=True))


def _run_rows(functions: Mapping[int, Any], arrays: list[Array]) -> list[Array]:
    """Return the outputs of independent rows: in runs of the largest number compiled, then one that is filled."""
    rows, largest = len(arrays[0]), max(functions)
    parts = []
    for start in range(0, max(1, rows), largest):
        part = [array[start : start + largest] for array in arrays]
        count = len(part[0])
        wanted = min(size for size in functions if size >= count)
        found = _invoke(functions[wanted], [padded(array, wanted) for array in part])
        parts.append([array[:count] for array in found])
    return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]


def _invoke(function: Any, arrays: Sequence[Array]) -> list[Array]:
    found = function(*arrays)
    return [np.array(one.to_host()) for one in (found if isinstance(found, (tuple, list)) else [found])]


class Iree(CpuBackend):
    """Loads what the target "iree" compiled, and functions that jax.export serialized."""

    name = "iree"
    title = "IREE"
    known: ClassVar[Mapping[str, type]] = {"threads": int}
    formats = frozenset({FORMAT})

    def prepare(self, device: str) -> None:
        """Import IREE's runtime. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def open(self, path: Path, signature: Signature, threads: int, options: Options, stop: Stop | None) -> IreeInstance:
        """Load the compiled model, or compile the function at `path`. Raises Failure(MODEL) or Failure(UNAVAILABLE)."""
        return IreeInstance(_library(), path, signature, threads)
