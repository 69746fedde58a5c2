"""Inspects a program of torch.export (.pt2): first what its file says, without PyTorch, then trial runs.

read, refuse what its load could execute ─> inputs and outputs ─> trials (ingest.inspection)

Imported by the processes that check and import alone. It needs PyTorch where the gateway runs: a check in a worker's
environment would have to be sent there and back, for a package that takes 900 MB on the disk. Decided so; a gateway
without it says what to install.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.plugins.engines.torch.document import FORMAT, Program, read_program
from millstream.plugins.engines.torch.torch_program import TorchProgram
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.inspection import inspect_program
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.onnx_checks import MESSAGE_CHARACTERS_MAX
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.ingest.trial_session import Array, TrialProgram
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.onnxruntime_values import library_message


def inspect(task: CheckTask, path: Path) -> CheckedModel:
    """Check the program at `path` and return how it is served. Raises Failure(INVALID)."""
    file = read_program(path)
    return inspect_program(task, path, trial_program(_import_torch(task.folder), path, file))


def trial_program(torch: Any, path: Path, file: Program) -> TrialProgram:
    """Return the program at `path`, loaded on one thread. Raises Failure(INVALID). `file`: what it says of itself."""
    program = _load(torch, path)
    inputs, outputs = ([ModelTensor(*tensor) for tensor in tensors] for tensors in (file.inputs, file.outputs))

    def run(arrays: Sequence[Array]) -> list[Array]:
        found = program.run([(array, tensor.datatype) for tensor, array in zip(inputs, arrays, strict=True)])
        for tensor, array in zip(outputs, found, strict=True):
            if array.dtype != NUMPY[tensor.datatype]:
                raise ValueError(f"output {tensor.name!r} is {array.dtype}, not {tensor.datatype}")
        return found

    return TrialProgram(
        kind="the program",
        inputs=inputs,
        outputs=outputs,
        run=run,
        unproven="graphs of PyTorch are not analysed",
        source_format=FORMAT,
        producer=f"torch {file.made_by}".strip(),
        opset=file.opset,
        version=file.schema,
    )


def _load(torch: Any, path: Path) -> TorchProgram:
    torch.set_num_threads(1)
    try:
        return TorchProgram(torch, path)
    except (Failure, MemoryError):
        raise
    except Exception as error:
        text = library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__
        raise invalid(f"PyTorch {torch.__version__} cannot load the program: {text}") from error


def _import_torch(folder: Path) -> Any:
    """Return PyTorch, imported inside the sandbox. Raises Failure(INVALID) with what to install if it is not there.

    Args:
        folder: that exists: PyTorch asks for a folder of temporary files, and writes nothing there.
    """
    tempfile.tempdir = str(folder)
    try:
        import torch.export
    except ImportError as error:
        raise invalid(
            f"a program of torch.export is checked with PyTorch, which the gateway does not have ({error}): install "
            "millstream[torch] where the gateway runs"
        ) from error
    return torch
