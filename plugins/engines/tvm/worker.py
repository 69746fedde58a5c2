"""The TVM backend: runs what the target "tvm" compiled on this machine.

tvm.json, model.so ─> TVM's virtual machine
The library is machine code, which runs in the worker as soon as it is loaded: no version has this format, and a load
needs the option that only a compilation writes. A run cannot be ended early.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from millstream.plugins.engines.tvm.target import load_tvm
from millstream.plugins.engines.worker import ProgramInstance, importing
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array, Options, Stop
from millstream.workers.backends.engine_parts import CpuBackend

_ANY_CORE = 1  # mode of TVM's thread pool: the larger cores first


class Document(BaseModel):
    """tvm.json: names in the function's order, and the file of the library."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    library: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _library() -> Any:
    with importing("tvm", "tvm"):
        return load_tvm()


class TvmInstance(ProgramInstance):
    """A compiled model."""

    title = "TVM"

    def __init__(self, library: Any, path: Path, signature: Signature, threads: int) -> None:
        self._library = library
        self._threads = max(1, threads)
        super().__init__(path, signature)

    def read(self, path: Path) -> Any:
        document = self.document(Document, path)
        self.check_names(document.inputs, document.outputs)
        if Path(document.library).name != document.library:
            raise Failure(Code.MODEL, f"TVM: {path.name} names a file that is not beside it")
        runtime = self._library.runtime
        module = runtime.load_module(str(path.parent / document.library))
        return document, runtime.vm.VirtualMachine(module, runtime.cpu())["main"]

    def call(self, program: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        document, function = program
        runtime = self._library.runtime
        # Of the calling thread, and of all instances that it runs.
        self._library.get_global_func("runtime.config_threadpool")(_ANY_CORE, self._threads)
        found = function(*(runtime.tensor(np.ascontiguousarray(inputs[name])) for name in document.inputs))
        arrays = [one.numpy() for one in ([found] if isinstance(found, runtime.Tensor) else found)]
        return dict(zip(document.outputs, arrays, strict=True))


class Tvm(CpuBackend):
    """Loads what the target "tvm" compiled."""

    name = "tvm"
    title = "TVM"
    known: ClassVar[Mapping[str, type]] = {"threads": int, "compiled": bool}
    formats: frozenset[str] = frozenset()

    def prepare(self, device: str) -> None:
        """Import TVM. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def open(self, path: Path, signature: Signature, threads: int, options: Options, stop: Stop | None) -> TvmInstance:
        """Load the compiled model. Raises Failure: MODEL, UNAVAILABLE, INVALID if it was not compiled by a race.

        Options: `compiled`, that a compilation on this machine wrote the library; `threads`.
        """
        if not options.get("compiled"):
            raise invalid("the backend tvm loads only what a race compiled on this machine")
        return TvmInstance(_library(), path, signature, threads)
