"""Loads a model into ONNX Runtime on one CPU thread, for trial runs, within the memory that there is.

When memory runs out the kernel kills the checker, and the model would be rejected for a batch that no worker runs.
Imported by the checker process only.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime
from onnx import TensorProto

from millstream.services.errors import invalid
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.onnx_checks import MESSAGE_CHARACTERS_MAX, is_out_of_memory
from millstream.services.ingest.proof import Proof
from millstream.services.model.datatypes import BYTES
from millstream.services.model.onnxruntime_values import bf16_bits, library_message, text_array
from millstream.services.model.signature import Signature

Array = np.ndarray[Any, Any]

#: approximate memory of all libraries before a model is loaded
_LIBRARIES_BYTES = 128 << 20
_MEMINFO = Path("/proc/meminfo")


class TrialError(Exception):
    """A run failed; `out_of_memory` says whether for lack of memory."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.out_of_memory = is_out_of_memory(message)


class Runs(Protocol):
    """Runs a model on one thread. Text is passed as arrays of str; BF16 as its bits in uint16."""

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return all outputs for the inputs, both in the model's order. Raises TrialError."""


class TrialSession(Runs, Protocol):
    """Also runs a model as a worker does."""

    def run_as_worker(self, signature: Signature, arrays: Mapping[str, Array]) -> list[Array]:
        """Return all outputs for inputs by name in a worker's form: text as `bytes`. Raises TrialError."""


class Session:
    """Runs the model at `path`. Text is passed as arrays of str; BF16 as its bits in uint16."""

    def __init__(self, path: Path, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]) -> None:
        self._inputs = inputs
        self._outputs = outputs
        variable = any(not isinstance(dim, int) for tensor in inputs for dim in tensor.dims[1:])
        try:
            options = _options(memory_pattern=not variable)  # the same as in workers
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            text = library_message(error, path, MESSAGE_CHARACTERS_MAX)
            hint = ": it needs more memory than a check may use" if is_out_of_memory(text) else ""
            raise invalid(f"ONNX Runtime cannot load the model{hint}: {text}") from error

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return all outputs for the inputs, both in the model's order. Raises TrialError."""
        return self.run_named(
            {tensor.name: _to_feed(tensor, array) for tensor, array in zip(self._inputs, arrays, strict=True)}
        )

    def run_as_worker(self, signature: Signature, arrays: Mapping[str, Array]) -> list[Array]:
        """Return all outputs for inputs by name in a worker's form: text as `bytes`. Raises TrialError."""
        datatypes = {spec.name: spec.datatype for spec in signature.inputs}
        return self.run_named({name: _to_feed_as_worker(datatypes[name], array) for name, array in arrays.items()})

    def run_named(self, feed: Mapping[str, Any]) -> list[Array]:
        """Return all outputs for inputs by name in the form that ONNX Runtime accepts. Raises TrialError."""
        names = [tensor.name for tensor in self._outputs]
        try:
            if all(tensor.datatype != "BF16" for tensor in self._outputs):
                return [np.asarray(output) for output in self._session.run(names, feed)]
            values = {name: _to_ort_value(fed) for name, fed in feed.items()}
            results = self._session.run_with_ort_values(names, values)
        except Exception as error:
            raise TrialError(library_message(error, None, MESSAGE_CHARACTERS_MAX) or type(error).__name__) from error
        pairs = zip(self._outputs, results, strict=True)
        return [bf16_bits(value) if tensor.datatype == "BF16" else value.numpy() for tensor, value in pairs]


class TrialProgram(NamedTuple):
    """A model to try that is no ONNX file, and whose graph is not analysed.

    Args:
        kind: what it is, for messages: "the function".
        run: returns all outputs for the inputs, both in order; BF16 is its bits in uint16. Raises anything.
        unproven: why no graph shows whether rows are independent.
        files: further files that a worker reads.
        version, opset: of the file's schema, and of its operators.
    """

    kind: str
    inputs: list[ModelTensor]
    outputs: list[ModelTensor]
    run: Callable[[Sequence[Array]], list[Array]]
    unproven: str
    source_format: str
    producer: str
    version: int = 0
    opset: int = 0
    files: tuple[Path, ...] = ()

    def open(self) -> _ProgramSession:
        return _ProgramSession(self)

    def prove(self) -> Proof:
        return Proof(False, self.kind, self.unproven)


class _ProgramSession:
    """Runs the model for trials."""

    def __init__(self, program: TrialProgram) -> None:
        self._program = program

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return all outputs for the inputs, both in order. Raises TrialError."""
        try:
            return self._program.run(arrays)
        except Exception as error:
            raise TrialError(library_message(error, None, MESSAGE_CHARACTERS_MAX) or type(error).__name__) from error

    def run_as_worker(self, signature: Signature, arrays: Mapping[str, Array]) -> list[Array]:
        """Return all outputs for inputs by name. Raises TrialError."""
        missing = [tensor.name for tensor in self._program.inputs if tensor.name not in arrays]
        if missing:
            raise TrialError(f"inputs {missing} are missing")
        return self.run([np.ascontiguousarray(arrays[tensor.name]) for tensor in self._program.inputs])


def _options(*, memory_pattern: bool) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = memory_pattern
    options.log_severity_level = 4
    return options


def _to_feed(tensor: ModelTensor, array: Array) -> Any:
    if tensor.datatype == "BF16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.BFLOAT16)
    return array


def _to_feed_as_worker(datatype: str, array: Array) -> Any:
    if datatype == BYTES:
        try:
            return text_array(array.ravel().tolist(), array.shape)
        except UnicodeDecodeError as error:
            raise TrialError("text that is not UTF-8") from error
    return _to_feed(ModelTensor("", datatype, ()), np.ascontiguousarray(array).reshape(array.shape))


def _to_ort_value(feed: Any) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(feed) if isinstance(feed, np.ndarray) else feed


def memory_allows(rows: int, largest: int) -> bool:
    """Return whether a run of `rows` rows may be tried after a run of `largest` rows, if memory grows with the rows.

    The growth must fit into half of the available memory. It is estimated from the peak so far, the model's weights
    included, and by a factor of 8 at most.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    growth = max(0, peak - _LIBRARIES_BYTES) * (min(rows / max(1, largest), 8.0) - 1)
    return growth <= available_bytes() / 2


def available_bytes(meminfo: Path = _MEMINFO) -> float:
    """Return the memory available without swapping (MemAvailable); infinity if the kernel does not report it."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), float("inf"))
