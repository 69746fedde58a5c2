"""The JAX backend: serves functions that jax.export serialized, compiled by XLA for the CPU.

load ─> refuse what may not run ─> deserialize
run: numpy ─> rows padded to a power of two where requests share runs ─> the program of these shapes ─> numpy

XLA compiles for fixed shapes: a run with new shapes compiles first. A run cannot be ended early.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from millstream.plugins.engines.jax.document import FORMAT
from millstream.plugins.engines.jax.jax_program import JaxProgram, Library, load_library
from millstream.plugins.engines.worker import ProgramInstance, importing, padded
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import NO_OPTIONS, Array, Options, Stop
from millstream.workers.backends.engine_parts import CpuBackend


def _library(threads: int | None = None) -> Library:
    with importing("jax", "jax", "jax", "jaxlib"):
        return load_library(threads)


def padded_rows(rows: int) -> int:
    """Return the rows of the run for `rows` rows that share it: the next power of two, so that few shapes occur."""
    return 1 << max(0, rows - 1).bit_length()


class JaxInstance(ProgramInstance):
    """A function whose inputs and outputs have the names of the signature."""

    title = "JAX"

    def __init__(self, library: Library, path: Path, signature: Signature, options: Options = NO_OPTIONS) -> None:
        self._library = library
        self._fast_math = bool(options.get("fast_math", False))
        self._exact = not options.get("padding", True)  # also if the function refuses sizes that padding makes
        super().__init__(path, signature)

    def read(self, path: Path) -> JaxProgram:
        program = JaxProgram(self._library, path, fast_math=self._fast_math)
        found = [(tensor.name, tensor.datatype) for tensor in (*program.inputs, *program.outputs)]
        wanted = [(spec.name, spec.datatype) for spec in (*self._signature.inputs, *self._signature.outputs)]
        if found != wanted:
            raise Failure(Code.MODEL, f"JAX: {path.name} has the tensors {found}, and the signature {wanted}")
        return program

    def call(self, program: JaxProgram, inputs: Mapping[str, Array]) -> dict[str, Array]:
        arrays = [inputs[tensor.name] for tensor in program.inputs]
        found = self._run_rows(program, arrays) if self._signature.batching else program.run(arrays)
        return {tensor.name: array for tensor, array in zip(program.outputs, found, strict=True)}

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

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
        super().close()


class Jax(CpuBackend):
    """Loads functions that jax.export serialized, on the CPU. XLA's threads are those of the process."""

    name = "jax"
    title = "JAX"
    known: ClassVar[Mapping[str, type]] = {"threads": int, "padding": bool, "fast_math": bool}
    formats = frozenset({FORMAT})

    def prepare(self, device: str) -> None:
        """Import JAX. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def open(self, path: Path, signature: Signature, threads: int, options: Options, stop: Stop | None) -> JaxInstance:
        """Read the function at `path`. Raises Failure(MODEL) or Failure(UNAVAILABLE).

        Options: `padding`, whether to fill runs up to a power of two rows (default True); `fast_math`, as XLA's;
        `threads`, which only the first load of a process can set.
        """
        return JaxInstance(_library(threads), path, signature, options)
