"""Exports programs and modules of PyTorch to ONNX with the exporter that is based on torch.export.

For the checker process only: it imports PyTorch, and is called by the importers of PyTorch, Hugging Face and Keras.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millstream.services.errors import invalid
from millstream.services.ingest.importers import IMPORTED, Array, Sample
from millstream.services.process.threads import NICE

#: what PyTorch's exporter imports besides PyTorch
MODULES = ("torch", "onnxscript")
_OPERATOR = re.compile(r"OpOverload\(op='([\w.:]+)'|target=torch\.ops\.([\w.]+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_REASON_CHARACTERS_MAX = 300


class Export(NamedTuple):
    """What is exported.

    Args:
        program: an ExportedProgram, or a module, which is traced with `arguments`.
        inputs, outputs: names in the ONNX model.
        arguments: example tensors of at least two rows, each a tensor of its own: equal ones become one input.
        shapes: the variable dimensions of each argument, {axis: torch.export.Dim}.
    """

    program: Any
    inputs: Sequence[str]
    outputs: Sequence[str]
    arguments: tuple[Any, ...] = ()
    shapes: Any = None


class CannotExport(Exception):
    """ONNX or its exporter cannot express the program. The message is the reason."""


def import_torch(*, exporter: bool = True) -> Any:
    """Return the module torch, which computes with one thread; `exporter`: with what its ONNX exporter imports.

    Raises Failure(INVALID) with what to install.
    """
    warnings.simplefilter("ignore")
    try:
        import torch
        import torch.export
        import torch.onnx

        if exporter:
            import onnxscript  # noqa: F401 - the exporter imports it late, and reports its absence less clearly
    except ImportError as error:
        raise invalid(
            f"PyTorch's ONNX exporter cannot be loaded where the gateway runs ({error}): install millstream[pytorch]"
        ) from error
    torch.set_num_threads(1)
    return torch


def load_torch() -> None:
    """Load PyTorch and its exporter, in the process that imports are forked from.

    That takes two thirds of the time of a small import. A child finds them loaded, and the modules that the first
    export imports, too. Not transformers or Keras: where they write is read when they are loaded. TensorFlow starts
    threads when it is loaded, so that it cannot be forked (`ingest.fork_server`).
    """
    os.nice(NICE)
    tqdm = importlib.import_module("tqdm").tqdm
    tqdm.monitor_interval = 0  # else the exporter's progress bar starts a thread
    torch = import_torch()
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()).eval()
    rows = ({0: torch.export.Dim("rows")},)
    torch.onnx.export(module, (torch.zeros(2, 2),), dynamo=True, verbose=False, dynamic_shapes=rows)


def export(torch: Any, what: Export, folder: Path) -> list[Path]:
    """Write `folder / imported / model.onnx`; returns it, followed by its weight files.

    Raises CannotExport; MemoryError.
    """
    target = folder / IMPORTED
    target.mkdir(exist_ok=True)
    path = target / "model.onnx"
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                what.program,
                what.arguments,
                dynamo=True,
                verbose=False,
                input_names=list(what.inputs),
                output_names=list(what.outputs),
                dynamic_shapes=what.shapes,
            )
        program.save(str(path))
    except MemoryError:
        raise
    except Exception as error:
        raise CannotExport(reason(error)) from error
    return [path, *sorted(other for other in target.iterdir() if other.name.startswith("model.onnx."))]


def reason(error: BaseException) -> str:
    """Return why an export failed, on one line: the operator that ONNX lacks, or the innermost error's message."""
    messages = []
    while True:
        messages.append(" ".join(_COLOURS.sub("", str(error)).split()))
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    for message in reversed(messages):
        named = _OPERATOR.search(message)
        if named is not None:
            operator = named[1] or named[2].removesuffix(".default")
            return f"ONNX has no form of PyTorch's operator {operator}"
    return (messages[-1] or type(error).__name__)[:_REASON_CHARACTERS_MAX]


def sample(torch: Any, module: Any, names: Sequence[str], outputs: Sequence[str], arrays: Sequence[Array]) -> Sample:
    """Return what the module answers to the arrays, in the order of its arguments."""
    with torch.inference_mode():
        found = module(*(torch.from_numpy(np.array(array)) for array in arrays))
    tensors = [found] if isinstance(found, torch.Tensor) else list(found)
    answers = (tensor.detach().contiguous().numpy() for tensor in tensors)
    return Sample(dict(zip(names, arrays, strict=True)), dict(zip(outputs, answers, strict=True)))
