"""Loads and runs a program of torch.export, for workers and the model check.

file ─> refuse what a load could execute ─> torch.export.load, tensors unpickled alone
arrays ─> tensors ─> its graph ─> arrays

PyTorch is passed in: only those two may import it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from millstream.plugins.engines.torch.document import read_program

Array = np.ndarray[Any, Any]
_LOADING = Lock()


@contextmanager
def tensors_only(torch: Any) -> Iterator[None]:
    """Let PyTorch unpickle tensors alone while the block runs, whatever its own code asks for. One at a time."""
    with _LOADING:
        load = torch.load

        def load_tensors(*arguments: Any, **options: Any) -> Any:
            return load(*arguments, **{**options, "weights_only": True})

        torch.load = load_tensors
        try:
            yield
        finally:
            torch.load = load


def load_program(torch: Any, path: Path) -> Any:
    """Return the checked program at `path` as an ExportedProgram. Raises Failure(INVALID), and what PyTorch raises."""
    read_program(path)
    with path.open("rb") as file, tensors_only(torch):
        return torch.export.load(file)


class TorchProgram:
    """A loaded program. `graph` may be replaced by a module that computes the same.

    Raises Failure(INVALID) for a file that is refused, and what PyTorch raises.
    """

    def __init__(self, torch: Any, path: Path) -> None:
        program = load_program(torch, path)
        self._torch = torch
        self.inputs = list(program.graph_signature.user_inputs)
        self.outputs = len(program.graph_signature.user_outputs)
        by_position, by_name = program.call_spec.in_spec.children()
        self._positions = by_position.num_children
        self._keywords = list(by_name.context or ())
        self.graph: Any = program.module()

    def run(self, inputs: Sequence[tuple[Array, str]]) -> list[Array]:
        """Return all outputs in order; BF16 is its bits in uint16. `inputs`: in order, with their v2 datatypes."""
        return call(self._torch, self.graph, (self._positions, self._keywords), inputs)


class CompiledProgram:
    """A program that AOTInductor compiled on this machine: machine code, which must not come from an upload.

    Args:
        torch: the library.
        path: the package.
        inputs: names of the inputs, in order.
        positions: how many of them are passed by position.
        keywords: names of the others.
    """

    def __init__(self, torch: Any, path: Path, inputs: list[str], positions: int, keywords: list[str]) -> None:
        self._torch = torch
        self._keywords, self._positions = keywords, positions
        self.inputs = inputs
        self.graph: Any = torch._inductor.aoti_load_package(str(path))

    def run(self, inputs: Sequence[tuple[Array, str]]) -> list[Array]:
        """As `TorchProgram.run`."""
        return call(self._torch, self.graph, (self._positions, self._keywords), inputs)


def call(torch: Any, graph: Any, form: tuple[int, Sequence[str]], inputs: Sequence[tuple[Array, str]]) -> list[Array]:
    """Return the outputs of a graph. `form`: how many inputs it takes by position, and the names of the others."""
    positions, keywords = form
    tensors = [_tensor(torch, array, datatype) for array, datatype in inputs]
    by_name = dict(zip(keywords, tensors[positions:], strict=True))
    with torch.inference_mode():
        found = graph(*tensors[:positions], **by_name)
    if isinstance(found, dict):
        found = list(found.values())
    values = [found] if isinstance(found, torch.Tensor) else list(found)
    return [_array(torch, value) for value in values]


def _tensor(torch: Any, array: Array, datatype: str) -> Any:
    """Return a copy of an input, which the program may change."""
    tensor = torch.from_numpy(np.array(array, order="C"))
    return tensor.view(torch.bfloat16) if datatype == "BF16" else tensor


def _array(torch: Any, tensor: Any) -> Array:
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.contiguous().view(torch.uint16)
    array: Array = tensor.numpy()
    return np.ascontiguousarray(array).reshape(array.shape)
