"""The PyTorch backend: serves programs that torch.export saved (.pt2), on the CPU.

load ─> torch.export.load ─> its graph, with a check before each operator ─> run: numpy ─> tensors ─> graph ─> numpy

A .pt2 file is code of somebody else: nothing checks it, so no upload becomes one, and only an operator can publish it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature
from millstream.services.process.allocator import trim
from millstream.workers.backends.base import Array, OutOfMemory, Stop, Terminated
from millstream.workers.backends.checked_inputs import CheckedInputs

FORMAT = "torch-export"
MESSAGE_CHARACTERS_MAX = 1000

_NO_MEMORY = re.compile(r"not enough memory|can't allocate memory|out of memory|bad_alloc", re.IGNORECASE)


def _library() -> Any:
    try:
        import torch
        import torch.export
    except ImportError as error:
        raise Failure(Code.UNAVAILABLE, f"torch cannot be imported ({error}): install millstream[torch]") from error
    return torch


def _reason(error: Exception, path: Path | None = None) -> str:
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__


class _Ended(Exception):
    """The run was terminated between two operators."""


class TorchInstance:
    """The graph of an exported program, whose inputs and outputs correspond to those of the signature by position.

    An operator in progress cannot be ended: a run ends before its next operator.
    """

    lost = ""

    def __init__(self, library: Any, path: Path, signature: Signature, threads: int) -> None:
        self._library = library
        self._path = path
        self._signature = signature
        self._threads = max(1, threads)
        self._inputs = CheckedInputs("PyTorch", signature)
        self._terminating = False
        self.size_bytes = 0
        self._graph: Any = None
        self._open()

    def _open(self) -> None:
        path = self._path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise Failure(Code.MODEL, f"the model cannot be loaded: {path.name}: {error.strerror}") from error
        try:
            program = self._library.export.load(io.BytesIO(content))
            names = list(program.graph_signature.user_inputs)
            outputs = len(program.graph_signature.user_outputs)
            graph = program.module()
        except MemoryError as error:
            raise OutOfMemory(f"there is no memory for the model: {path.name}") from error
        except Exception as error:
            if _NO_MEMORY.search(str(error)):
                raise OutOfMemory(f"there is no memory for the model: {_reason(error, path)}") from error
            raise Failure(Code.MODEL, f"PyTorch cannot load {path.name}: {_reason(error, path)}") from error
        self._names = [spec.name for spec in self._signature.inputs]
        if sorted(names) != sorted(self._names) or outputs != len(self._signature.outputs):
            raise Failure(
                Code.MODEL,
                f"PyTorch: {path.name} has the inputs {names} and {outputs} outputs, and the signature "
                f"{self._names} and {len(self._signature.outputs)}",
            )
        self._names = names
        self._graph = self._with_checks(graph)

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
        graph, torch = self._graph, self._library
        if graph is None:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        self._inputs.check(inputs)
        if torch.get_num_threads() != self._threads:  # of the whole process
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                found = graph(*(self._tensor(name, inputs) for name in self._names))
            values = [found] if isinstance(found, torch.Tensor) else list(found)
            return [self._array(value, spec.datatype) for value, spec in zip(values, self._outputs, strict=True)]
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

    @property
    def _outputs(self) -> Sequence[Any]:
        return self._signature.outputs

    def _tensor(self, name: str, inputs: Mapping[str, Array]) -> Any:
        """Return a copy of an input, which the program may change."""
        if name not in inputs:
            raise Failure(Code.MODEL, f"PyTorch: input {name!r} is missing; it cannot be left out here")
        tensor = self._library.from_numpy(np.array(inputs[name], order="C"))
        datatype = next(spec.datatype for spec in self._signature.inputs if spec.name == name)
        return tensor.view(self._library.bfloat16) if datatype == "BF16" else tensor

    def _array(self, tensor: Any, datatype: str) -> Array:
        torch = self._library
        if tensor.dtype is torch.bfloat16 and datatype == "BF16":
            tensor = tensor.contiguous().view(torch.uint16)
        elif tensor.dtype is torch.bfloat16:
            raise Failure(Code.MODEL, f"PyTorch: an output is BF16, not {datatype}")
        array: Array = tensor.numpy()
        if array.dtype != NUMPY[datatype]:
            raise Failure(Code.MODEL, f"PyTorch: an output is {array.dtype}, not {datatype}")
        return np.ascontiguousarray(array).reshape(array.shape)

    def terminate(self) -> None:
        self._terminating = True

    def rebuild(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self._graph = None
        trim()


class Torch:
    """Loads .pt2 files on the CPU. The number of threads is that of the process: all instances share it."""

    name = "torch"
    formats = frozenset({FORMAT})

    def prepare(self, device: str) -> None:
        """Import torch. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def target(self, device: str) -> None:
        """Return None: nothing is compiled."""

    def compile(self, path: Path, folder: Path, signature: Signature, device: str, threads: int) -> list[str]:
        """Raise Failure(UNSUPPORTED)."""
        raise Failure(Code.UNSUPPORTED, f"the backend {self.name} compiles nothing")

    def load(
        self, path: Path, signature: Signature, device: str, threads: int, stop: Stop | None = None
    ) -> TorchInstance:
        """Read the program at `path`. Raises Failure(MODEL) or Failure(UNAVAILABLE)."""
        if device != "cpu":
            raise Failure(Code.UNAVAILABLE, f"the backend torch cannot use the device {device!r}; known: cpu")
        for spec in (*signature.inputs, *signature.outputs):
            if spec.datatype == BYTES:
                raise Failure(Code.MODEL, f"PyTorch has no text: {spec.name!r} is BYTES")
        if stop is not None and stop.reason:
            raise Failure(Code.MODEL, stop.reason)
        return TorchInstance(_library(), path, signature, threads)
