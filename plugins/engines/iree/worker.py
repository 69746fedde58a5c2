"""The IREE backend: runs what IREE compiled for this CPU, and compiles functions of JAX when it loads them.

iree.json, *.vmfb ─> loaded into IREE's runtime
model.jax ─> compiled in a confined process (services.compiler), then loaded
run: rows as they are, or filled up to one of the numbers of rows that were compiled

A run cannot be ended early.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from millstream.plugins.compile.candidate import CompileTask, Subject
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.engines.iree.target import Iree as IreeTarget
from millstream.plugins.engines.jax.document import FORMAT, is_export_file
from millstream.services.errors import Code, Failure
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature
from millstream.services.process.process_memory import trim
from millstream.workers.backends.base import Array, Options, OutOfMemory, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, CpuBackend, ordered, padded, whole_import

MESSAGE_CHARACTERS_MAX = 1000
COMPILE_S_MAX = 300.0  # of a load of a function; beyond, the load fails
_DOCUMENT_BYTES_MAX = 1 << 20
_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc|failed to allocate", re.IGNORECASE)


class Document(BaseModel):
    """iree.json: names in the program's order, and its files by rows; "0": variable rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    files: dict[int, str]


def _library() -> Any:
    try:
        with whole_import("iree"):
            import iree.runtime
    except ImportError as error:
        raise Failure(
            Code.UNAVAILABLE, f"iree.runtime cannot be imported ({error}): install millstream[iree]"
        ) from error
    return iree.runtime


def _reason(error: Exception, path: Path | None = None) -> str:
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__


class IreeInstance:
    """A compiled model. `terminate` ends the next run."""

    lost = ""

    def __init__(self, library: Any, path: Path, signature: Signature, threads: int) -> None:
        self._library = library
        self._path = path
        self._signature = signature
        self._driver = "local-sync" if threads <= 1 else "local-task"
        if threads > 1:  # of the task system, which the process has one of: effective before it starts
            library.flags.parse_flags(f"--task_topology_max_group_count={threads}")
        self._checked = CheckedInputs("IREE", signature)
        self._terminating = False
        self.size_bytes = 0
        self._functions: dict[int, Any] = {}
        self._open()

    def _open(self) -> None:
        path = self._path
        try:
            if path.suffix == ".json" or not is_export_file(path):
                self._read(path)
            else:
                with tempfile.TemporaryDirectory(prefix="iree-") as folder:
                    self._read(self._compile(path, Path(folder) / "model"))
        except Failure:
            raise
        except ValidationError as error:
            raise Failure(Code.MODEL, f"IREE: {path.name} is no document of a compiled model") from error
        except OSError as error:
            raise Failure(Code.MODEL, f"the model cannot be loaded: {path.name}: {error.strerror}") from error
        except MemoryError as error:
            raise OutOfMemory(f"there is no memory for the model: {path.name}") from error
        except Exception as error:
            raise Failure(Code.MODEL, f"IREE cannot load {path.name}: {_reason(error, path)}") from error

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            self._document = Document.model_validate_json(file.read(_DOCUMENT_BYTES_MAX))
        self._check_names(path)
        self._functions = {rows: self._load(path.parent / name) for rows, name in self._document.files.items()}

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

    def _check_names(self, path: Path) -> None:
        inputs = {spec.name for spec in self._signature.inputs}
        outputs = [spec.name for spec in self._signature.outputs]
        if not set(self._document.inputs) <= inputs or sorted(self._document.outputs) != sorted(outputs):
            raise Failure(Code.MODEL, f"IREE: {path.name} has other inputs or outputs than the signature")

    def _load(self, path: Path) -> Any:
        runtime = self._library
        context = runtime.SystemContext(config=runtime.Config(self._driver))
        module = runtime.VmModule.copy_buffer(context.instance, path.read_bytes())
        context.add_vm_module(module)
        names = [name for name in module.function_names if name != "__init" and not name.endswith("$async")]
        return context.modules[module.name][names[0]]

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        if not self._functions:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        if self._terminating:
            self._terminating = False
            raise Terminated
        self._checked.check(inputs)
        missing = [spec.name for spec in self._signature.inputs if spec.name not in inputs]
        if missing:
            raise Failure(Code.MODEL, f"IREE: inputs {missing} are missing; they cannot be left out here")
        arrays = [np.ascontiguousarray(inputs[name]).reshape(inputs[name].shape) for name in self._document.inputs]
        try:
            if 0 in self._functions:
                return ordered("IREE", self._signature, self._document.outputs, self._invoke(0, arrays))
            return ordered("IREE", self._signature, self._document.outputs, self._run_rows(arrays))
        except MemoryError as error:
            raise OutOfMemory("IREE: out of memory") from error
        except Failure:
            raise
        except Exception as error:
            reason = _reason(error)
            if _NO_MEMORY.search(reason):
                raise OutOfMemory(f"IREE: out of memory: {reason}") from error
            raise Failure(Code.MODEL, f"IREE: {reason}") from error

    def _run_rows(self, arrays: list[Array]) -> list[Array]:
        """Return the outputs of independent rows: in runs of the largest number compiled, then one that is filled."""
        rows, largest = len(arrays[0]), max(self._functions)
        parts = []
        for start in range(0, max(1, rows), largest):
            part = [array[start : start + largest] for array in arrays]
            count = len(part[0])
            wanted = min(size for size in self._functions if size >= count)
            found = self._invoke(wanted, [padded(array, wanted) for array in part])
            parts.append([array[:count] for array in found])
        return [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]

    def _invoke(self, rows: int, arrays: Sequence[Array]) -> list[Array]:
        found = self._functions[rows](*arrays)
        return [np.array(one.to_host()) for one in (found if isinstance(found, (tuple, list)) else [found])]

    def terminate(self) -> None:
        self._terminating = True

    def rebuild(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self._functions = {}
        trim()


class Iree(CpuBackend):
    """Loads what the target "iree" compiled, and functions that jax.export serialized."""

    name = "iree"
    title = "IREE"
    known: ClassVar[Mapping[str, type]] = {"threads": int}
    formats = frozenset({FORMAT})

    def prepare(self, device: str) -> None:
        """Import IREE's runtime. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def open(self, path: Path, signature: Signature, threads: int, options: Options) -> IreeInstance:
        """Load the compiled model, or compile the function at `path`. Raises Failure(MODEL) or Failure(UNAVAILABLE)."""
        return IreeInstance(_library(), path, signature, threads)
