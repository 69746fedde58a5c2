"""The TVM backend: runs what the target "tvm" compiled on this machine.

tvm.json, model.so ─> TVM's virtual machine
The library is machine code, which runs in the worker as soon as it is loaded: no version has this format, and a load
needs the option that only a compilation writes. A run cannot be ended early.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from millstream.plugins.engines.tvm.library import load_tvm
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature
from millstream.services.process.process_memory import trim
from millstream.workers.backends.base import Array, Options, OutOfMemory, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, CpuBackend, ordered

MESSAGE_CHARACTERS_MAX = 1000
_DOCUMENT_BYTES_MAX = 1 << 20
_ANY_CORE = 1  # mode of TVM's thread pool: the larger cores first
_NO_MEMORY = re.compile(r"out of memory|bad_alloc|failed to allocate|alloc.* failed", re.IGNORECASE)


class Document(BaseModel):
    """tvm.json: names in the function's order, and the file of the library."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    library: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _library() -> Any:
    try:
        return load_tvm()
    except ImportError as error:
        raise Failure(Code.UNAVAILABLE, f"tvm cannot be imported ({error}): install millstream[tvm]") from error


def _reason(error: Exception, path: Path | None = None) -> str:
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__


class TvmInstance:
    """A compiled model. `terminate` ends the next run."""

    lost = ""

    def __init__(self, library: Any, path: Path, signature: Signature, threads: int) -> None:
        self._library = library
        self._path = path
        self._signature = signature
        self._threads = max(1, threads)
        self._checked = CheckedInputs("TVM", signature)
        self._terminating = False
        self.size_bytes = 0
        self._function: Any = None
        self._open()

    def _open(self) -> None:
        path = self._path
        try:
            with path.open("rb") as file:
                self._document = Document.model_validate_json(file.read(_DOCUMENT_BYTES_MAX))
            self._check_names()
            if Path(self._document.library).name != self._document.library:
                raise Failure(Code.MODEL, f"TVM: {path.name} names a file that is not beside it")
            module = self._library.runtime.load_module(str(path.parent / self._document.library))
            self._function = self._library.runtime.vm.VirtualMachine(module, self._library.runtime.cpu())["main"]
        except Failure:
            raise
        except ValidationError as error:
            raise Failure(Code.MODEL, f"TVM: {path.name} is no document of a compiled model") from error
        except MemoryError as error:
            raise OutOfMemory(f"there is no memory for the model: {path.name}") from error
        except OSError as error:
            raise Failure(Code.MODEL, f"the model cannot be loaded: {path.name}: {error.strerror or error}") from error
        except Exception as error:
            raise Failure(Code.MODEL, f"TVM cannot load {path.name}: {_reason(error, path)}") from error

    def _check_names(self) -> None:
        inputs = {spec.name for spec in self._signature.inputs}
        outputs = [spec.name for spec in self._signature.outputs]
        if not set(self._document.inputs) <= inputs or sorted(self._document.outputs) != sorted(outputs):
            raise Failure(Code.MODEL, f"TVM: {self._path.name} has other inputs or outputs than the signature")

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        if self._function is None:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        if self._terminating:
            self._terminating = False
            raise Terminated
        self._checked.check(inputs)
        missing = [spec.name for spec in self._signature.inputs if spec.name not in inputs]
        if missing:
            raise Failure(Code.MODEL, f"TVM: inputs {missing} are missing; they cannot be left out here")
        try:
            found = self._call([inputs[name] for name in self._document.inputs])
            return ordered("TVM", self._signature, self._document.outputs, found)
        except MemoryError as error:
            raise OutOfMemory("TVM: out of memory") from error
        except Failure:
            raise
        except Exception as error:
            reason = _reason(error)
            if _NO_MEMORY.search(reason):
                raise OutOfMemory(f"TVM: out of memory: {reason}") from error
            raise Failure(Code.MODEL, f"TVM: {reason}") from error

    def _call(self, arrays: Sequence[Array]) -> list[Array]:
        runtime = self._library.runtime
        # Of the calling thread, and of all instances that it runs.
        self._library.get_global_func("runtime.config_threadpool")(_ANY_CORE, self._threads)
        found = self._function(*(runtime.tensor(np.ascontiguousarray(array)) for array in arrays))
        return [one.numpy() for one in ([found] if isinstance(found, runtime.Tensor) else found)]

    def terminate(self) -> None:
        self._terminating = True

    def rebuild(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self._function = None
        trim()


class Tvm(CpuBackend):
    """Loads what the target "tvm" compiled."""

    name = "tvm"
    title = "TVM"
    known: ClassVar[Mapping[str, type]] = {"threads": int, "compiled": bool}
    formats: frozenset[str] = frozenset()

    def prepare(self, device: str) -> None:
        """Import TVM. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def open(self, path: Path, signature: Signature, threads: int, options: Options) -> TvmInstance:
        """Load the compiled model. Raises Failure: MODEL, UNAVAILABLE, INVALID if it was not compiled by a race.

        Options: `compiled`, that a compilation on this machine wrote the library; `threads`.
        """
        if not options.get("compiled"):
            raise invalid("the backend tvm loads only what a race compiled on this machine")
        return TvmInstance(_library(), path, signature, threads)
