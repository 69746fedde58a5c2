"""The PyTorch backend: serves programs that torch.export saved (.pt2), on the CPU.

load ─> refuse what a load could execute ─> torch.export.load ─> its graph, with a check before each operator
run: numpy ─> tensors ─> graph ─> numpy

A .pt2 file is untrusted code: document.py and archive.py say what of it is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from millstream.plugins.engines.torch.document import FORMAT
from millstream.plugins.engines.torch.torch_program import CompiledProgram, TorchProgram
from millstream.plugins.engines.worker import ProgramInstance, importing
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import NO_OPTIONS, Array, Options, Stop, Terminated
from millstream.workers.backends.engine_parts import CpuBackend

#: Options of a load. `aotinductor`: the file is a package that AOTInductor compiled on this machine; the others say how
#: its program is called.
OPTIONS = {"threads": int, "aotinductor": bool, "inputs": str, "positional": int, "keywords": str}


def _library() -> Any:
    with importing("torch", "torch", "torch"):
        import torch
        import torch.export
    return torch


class TorchInstance(ProgramInstance):
    """The graph of an exported program, whose inputs and outputs correspond to those of the signature by position.

    An operator in progress cannot be ended: a run ends before its next operator. A program that AOTInductor compiled is
    one operator.
    """

    title = "PyTorch"

    def __init__(
        self, library: Any, path: Path, signature: Signature, threads: int, options: Options = NO_OPTIONS
    ) -> None:
        self._options = options
        self._library = library
        self._threads = max(1, threads)
        self._datatypes = {spec.name: spec.datatype for spec in signature.inputs}
        super().__init__(path, signature)

    def read(self, path: Path) -> TorchProgram | CompiledProgram:
        expected = len(self._signature.outputs)
        program = self._compiled(path) if self._options.get("aotinductor") else TorchProgram(self._library, path)
        outputs = program.outputs if isinstance(program, TorchProgram) else expected
        if sorted(program.inputs) != sorted(self._datatypes) or outputs != expected:
            raise Failure(
                Code.MODEL,
                f"PyTorch: {path.name} has the inputs {program.inputs} and {outputs} outputs, and the "
                f"signature {[*self._datatypes]} and {expected}",
            )
        if isinstance(program, TorchProgram):
            program.graph = self._with_checks(program.graph)
        return program

    def _compiled(self, path: Path) -> CompiledProgram:
        options = self._options
        names = {name: [one for one in str(options.get(name, "")).split(",") if one] for name in ("inputs", "keywords")}
        return CompiledProgram(
            self._library, path, names["inputs"], int(options.get("positional", 0)), names["keywords"]
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
            raise Terminated

    def call(self, program: TorchProgram | CompiledProgram, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._library.get_num_threads() != self._threads:  # of the whole process
            self._library.set_num_threads(self._threads)
        found = program.run([(inputs[name], self._datatypes[name]) for name in program.inputs])
        return {spec.name: array for spec, array in zip(self._signature.outputs, found, strict=True)}


class Torch(CpuBackend):
    """Loads .pt2 files on the CPU. The number of threads is that of the process: all instances share it."""

    name = "torch"
    title = "PyTorch"
    known: ClassVar[Mapping[str, type]] = OPTIONS
    formats = frozenset({FORMAT})

    def prepare(self, device: str) -> None:
        """Import torch. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def open(
        self, path: Path, signature: Signature, threads: int, options: Options, stop: Stop | None
    ) -> TorchInstance:
        """Read the program at `path`. Raises Failure(MODEL) or Failure(UNAVAILABLE)."""
        return TorchInstance(_library(), path, signature, threads, options)
