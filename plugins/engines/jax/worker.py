"""The JAX backend: serves functions that jax.export serialized, compiled by XLA for the CPU.

load ─> refuse what may not run ─> deserialize
run: numpy ─> rows padded to a power of two where requests share runs ─> the program of these shapes ─> numpy

XLA compiles for fixed shapes: a run with new shapes compiles first. A run cannot be ended early.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from millstream.plugins.engines.jax.document import FORMAT
from millstream.plugins.engines.jax.jax_program import JaxProgram
from millstream.plugins.engines.jax.library import Library, load_library
from millstream.services.errors import Code, Failure
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature
from millstream.services.process.process_memory import trim
from millstream.workers.backends.base import NO_OPTIONS, Array, Options, OutOfMemory, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, CpuBackend, padded, whole_import

MESSAGE_CHARACTERS_MAX = 1000

_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|bad_alloc|failed to allocate", re.IGNORECASE)


def _library(threads: int | None = None) -> Library:
    try:
        with whole_import("jax", "jaxlib"):
            return load_library(threads)
    except ImportError as error:
        raise Failure(Code.UNAVAILABLE, f"jax cannot be imported ({error}): install millstream[jax]") from error


def _reason(error: Exception, path: Path | None = None) -> str:
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__


def padded_rows(rows: int) -> int:
    """Return the rows of the run for `rows` rows that share it: the next power of two, so that few shapes occur."""
    return 1 << max(0, rows - 1).bit_length()


class JaxInstance:
    """A function whose inputs and outputs have the names of the signature. `terminate` ends the next run."""

    lost = ""

    def __init__(self, library: Library, path: Path, signature: Signature, options: Options = NO_OPTIONS) -> None:
        self._library = library
        self._path = path
        self._signature = signature
        self._checked = CheckedInputs("JAX", signature)
        self._terminating = False
        self._fast_math = bool(options.get("fast_math", False))
        self._exact = not options.get("padding", True)  # also if the function refuses sizes that padding makes
        self.size_bytes = 0
        self._program: JaxProgram | None = None
        self._open()

    def _open(self) -> None:
        path = self._path
        try:
            program = JaxProgram(self._library, path, fast_math=self._fast_math)
        except Failure as failure:
            raise Failure(Code.MODEL, f"JAX: {path.name}: {failure.message}") from failure
        except OSError as error:
            raise Failure(Code.MODEL, f"the model cannot be loaded: {path.name}: {error.strerror}") from error
        except MemoryError as error:
            raise OutOfMemory(f"there is no memory for the model: {path.name}") from error
        except Exception as error:
            raise Failure(Code.MODEL, f"JAX cannot load {path.name}: {_reason(error, path)}") from error
        found = [(tensor.name, tensor.datatype) for tensor in (*program.inputs, *program.outputs)]
        wanted = [(spec.name, spec.datatype) for spec in (*self._signature.inputs, *self._signature.outputs)]
        if found != wanted:
            raise Failure(Code.MODEL, f"JAX: {path.name} has the tensors {found}, and the signature {wanted}")
        self._program = program

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        if self._program is None:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        if self._terminating:
            self._terminating = False
            raise Terminated
        self._checked.check(inputs)
        missing = [tensor.name for tensor in self._program.inputs if tensor.name not in inputs]
        if missing:
            raise Failure(Code.MODEL, f"JAX: inputs {missing} are missing; they cannot be left out here")
        arrays = [inputs[tensor.name] for tensor in self._program.inputs]
        try:
            return self._run_rows(self._program, arrays) if self._signature.batching else self._program.run(arrays)
        except MemoryError as error:
            raise OutOfMemory("JAX: out of memory") from error
        except Exception as error:
            reason = _reason(error)
            if _NO_MEMORY.search(reason):
                raise OutOfMemory(f"JAX: out of memory: {reason}") from error
            raise Failure(Code.MODEL, f"JAX: {reason}") from error

    def _run_rows(self, program: JaxProgram, arrays: list[Array]) -> list[Array]:
        """Return the outputs of independent rows, of which there may be none."""
        rows = len(arrays[0])
        wanted = max(1, rows) if self._exact else padded_rows(rows)
        if wanted == rows:
            return program.run(arrays)
        try:
            found = program.run([padded(array, wanted) for array in arrays])
        except ValueError:  # a size that the function does not allow
            if self._exact or not rows:
                raise
            self._exact = True
            return program.run(arrays)
        return [np.ascontiguousarray(array[:rows]) for array in found]

    def terminate(self) -> None:
        self._terminating = True

    def rebuild(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program = None
        trim()


class Jax(CpuBackend):
    """Loads functions that jax.export serialized, on the CPU. XLA's threads are those of the process."""

    name = "jax"
    title = "JAX"
    known: ClassVar[Mapping[str, type]] = {"threads": int, "padding": bool, "fast_math": bool}
    formats = frozenset({FORMAT})

    def prepare(self, device: str) -> None:
        """Import JAX. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def open(self, path: Path, signature: Signature, threads: int, options: Options) -> JaxInstance:
        """Read the function at `path`. Raises Failure(MODEL) or Failure(UNAVAILABLE).

        Options: `padding`, whether to fill runs up to a power of two rows (default True); `fast_math`, as XLA's;
        `threads`, which only the first load of a process can set.
        """
        return JaxInstance(_library(threads), path, signature, options)
