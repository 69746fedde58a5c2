"""Loads a program of torch.export into PyTorch, on one CPU thread, for trial runs. For the checker process only."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from millstream.plugins.engines.torch.torch_program import TorchProgram
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.onnx_checks import MESSAGE_CHARACTERS_MAX
from millstream.services.ingest.trial_session import Array, TrialError
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature


class ProgramSession:
    """Runs the program at `path`. BF16 is its bits in uint16."""

    def __init__(self, path: Path, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]) -> None:
        import torch.export

        self._inputs = inputs
        self._outputs = outputs
        torch.set_num_threads(1)
        try:
            self._program = TorchProgram(torch, path)
        except (Failure, MemoryError):
            raise
        except Exception as error:
            text = library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__
            raise invalid(f"PyTorch {torch.__version__} cannot load the program: {text}") from error

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return all outputs for the inputs, both in the program's order. Raises TrialError."""
        try:
            found = self._program.run(
                [(array, tensor.datatype) for tensor, array in zip(self._inputs, arrays, strict=True)]
            )
        except Exception as error:
            raise TrialError(library_message(error, None, MESSAGE_CHARACTERS_MAX) or type(error).__name__) from error
        for tensor, array in zip(self._outputs, found, strict=True):
            if array.dtype != NUMPY[tensor.datatype]:
                raise TrialError(f"output {tensor.name!r} is {array.dtype}, not {tensor.datatype}")
        return found

    def run_as_worker(self, signature: Signature, arrays: Mapping[str, Array]) -> list[Array]:
        """Return all outputs for inputs by name. Raises TrialError."""
        missing = [tensor.name for tensor in self._inputs if tensor.name not in arrays]
        if missing:
            raise TrialError(f"inputs {missing} are missing")
        return self.run([np.ascontiguousarray(arrays[tensor.name]) for tensor in self._inputs])


def import_torch(folder: Path) -> None:
    """Import PyTorch inside the sandbox. Raises Failure(INVALID) with what to install if it is not there.

    Args:
        folder: that exists: PyTorch asks for a folder of temporary files, and writes nothing there.
    """
    tempfile.tempdir = str(folder)
    try:
        import torch.export  # noqa: F401 - whether it can be imported
    except ImportError as error:
        raise invalid(
            f"a program of torch.export is checked with PyTorch, which the gateway does not have ({error}): install "
            "millstream[torch] where the gateway runs"
        ) from error
