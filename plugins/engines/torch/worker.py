"""The PyTorch backend: serves programs that torch.export saved (.pt2), on the CPU.

load ─> refuse what a load could execute ─> torch.export.load ─> its graph, with a check before each operator
run: numpy ─> tensors ─> graph ─> numpy

A .pt2 file is untrusted code: services/model/exported_program.py says what of it is served.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from millstream.plugins.engines.torch.document import FORMAT
from millstream.plugins.engines.torch.torch_program import CompiledProgram, TorchProgram
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.process.process_memory import trim
from millstream.workers.backends.base import NO_OPTIONS, Array, Options, OutOfMemory, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, CpuBackend, whole_import

MESSAGE_CHARACTERS_MAX = 1000

_NO_MEMORY = re.compile(r"not enough memory|can't allocate memory|out of memory|bad_alloc", re.IGNORECASE)


def _library() -> Any:
    try:
        with whole_import("torch"):
            import torch
            import torch.export
    except ImportError as error:
        raise Failure(Code.UNAVAILABLE, f"torch cannot be imported ({error}): install millstream[torch]") from error
    return torch


def _reason(error: Exception, path: Path | None = None) -> str:
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__


#: Options of a load. `aotinductor`: the file is a package that AOTInductor compiled on this machine; the others say how
#: its program is called.
OPTIONS = {"threads": int, "aotinductor": bool, "inputs": str, "positional": int, "keywords": str}


class _Ended(Exception):
    """The run was terminated between two operators."""


class TorchInstance:
    """The graph of an exported program, whose inputs and outputs correspond to those of the signature by position.

    An operator in progress cannot be ended: a run ends before its next operator. A program that AOTInductor compiled is
    one operator.
    """

    lost = ""

    def __init__(
        self, library: Any, path: Path, signature: Signature, threads: int, options: Options = NO_OPTIONS
    ) -> None:
        self._options = options
        self._library = library
        self._path = path
        self._signature = signature
        self._threads = max(1, threads)
        self._inputs = CheckedInputs("PyTorch", signature)
        self._terminating = False
        self.size_bytes = 0
        self._program: TorchProgram | CompiledProgram | None = None
        self._open()

    def _open(self) -> None:
        path = self._path
        try:
            program = self._compiled() if self._options.get("aotinductor") else TorchProgram(self._library, path)
        except Failure as failure:
            raise Failure(Code.MODEL, f"PyTorch: {path.name}: {failure.message}") from failure
        except OSError as error:
            raise Failure(Code.MODEL, f"the model cannot be loaded: {path.name}: {error.strerror}") from error
        except MemoryError as error:
            raise OutOfMemory(f"there is no memory for the model: {path.name}") from error
        except Exception as error:
            if _NO_MEMORY.search(str(error)):
                raise OutOfMemory(f"there is no memory for the model: {_reason(error, path)}") from error
            raise Failure(Code.MODEL, f"PyTorch cannot load {path.name}: {_reason(error, path)}") from error
        self._datatypes = {spec.name: spec.datatype for spec in self._signature.inputs}
        outputs = program.outputs if isinstance(program, TorchProgram) else len(self._signature.outputs)
        if sorted(program.inputs) != sorted(self._datatypes) or outputs != len(self._signature.outputs):
            raise Failure(
                Code.MODEL,
                f"PyTorch: {path.name} has the inputs {program.inputs} and {outputs} outputs, and the "
                f"signature {[*self._datatypes]} and {len(self._signature.outputs)}",
            )
        if isinstance(program, TorchProgram):
            program.graph = self._with_checks(program.graph)
        self._program = program

    def _compiled(self) -> CompiledProgram:
        options = self._options
        names = {name: [one for one in str(options.get(name, "")).split(",") if one] for name in ("inputs", "keywords")}
        return CompiledProgram(
            self._library, self._path, names["inputs"], int(options.get("positional", 0)), names["keywords"]
        )

    def _with_checks(self, graph: Any) -> Any:
        """Return the graph with a call of `_end_if_terminated` before each operator."""
        for node in list(graph.graph.nodes):
            if node.op in {"call_function", "call_module"}:
                with graph.graph.inserting_before(node):
                    graph.graph.call_function(self._end_if_terminated)
        graph.recompile()
        return graph

    def _end_if_terminated(self) -> None:
        if self._terminating:
            raise _Ended

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        program, torch = self._program, self._library
        if program is None:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        self._inputs.check(inputs)
        if torch.get_num_threads() != self._threads:  # of the whole process
            torch.set_num_threads(self._threads)
        try:
            found = program.run([(_given(inputs, name), self._datatypes[name]) for name in program.inputs])
            return [_checked(array, spec) for array, spec in zip(found, self._signature.outputs, strict=True)]
        except _Ended as error:
            self._terminating = False
            raise Terminated from error
        except Failure:
            raise
        except MemoryError as error:
            raise OutOfMemory("PyTorch: out of memory") from error
        except Exception as error:
            reason = _reason(error)
            if _NO_MEMORY.search(reason):
                raise OutOfMemory(f"PyTorch: out of memory: {reason}") from error
            raise Failure(Code.MODEL, f"PyTorch: {reason}") from error

    def terminate(self) -> None:
        self._terminating = True

    def rebuild(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self._program = None
        trim()


def _given(inputs: Mapping[str, Array], name: str) -> Array:
    if name not in inputs:
        raise Failure(Code.MODEL, f"PyTorch: input {name!r} is missing; it cannot be left out here")
    return inputs[name]


def _checked(array: Array, spec: TensorSpec) -> Array:
    if array.dtype != NUMPY[spec.datatype]:
        raise Failure(Code.MODEL, f"PyTorch: output {spec.name!r} is {array.dtype}, not {spec.datatype}")
    return array


class Torch(CpuBackend):
    """Loads .pt2 files on the CPU. The number of threads is that of the process: all instances share it."""

    name = "torch"
    title = "PyTorch"
    known: ClassVar[Mapping[str, type]] = OPTIONS
    formats = frozenset({FORMAT})

    def prepare(self, device: str) -> None:
        """Import torch. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def open(self, path: Path, signature: Signature, threads: int, options: Options) -> TorchInstance:
        """Read the program at `path`. Raises Failure(MODEL) or Failure(UNAVAILABLE)."""
        return TorchInstance(_library(), path, signature, threads, options)
