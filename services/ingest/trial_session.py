"""Loads a model into ONNX Runtime on one CPU thread, for trial runs. Imported by the checker process only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime
from onnx import TensorProto

from millstream.services.errors import invalid
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.onnx_checks import MESSAGE_CHARACTERS_MAX, is_out_of_memory
from millstream.services.model.datatypes import BYTES
from millstream.services.model.onnxruntime_values import bf16_bits, library_message, text_array
from millstream.services.model.signature import Signature

Array = np.ndarray[Any, Any]


class TrialError(Exception):
    """A run failed; `out_of_memory` says whether for lack of memory."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.out_of_memory = is_out_of_memory(message)


class TrialSession(Protocol):
    """Runs a model on one thread. Text is passed as arrays of str; BF16 as its bits in uint16."""

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return all outputs for the inputs, both in the model's order. Raises TrialError."""

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
