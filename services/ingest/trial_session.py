"""A model loaded in ONNX Runtime on one CPU thread, for trial runs. Imported by the checker process only."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto

from millstream.services.errors import invalid
from millstream.services.ingest.model_io import ModelTensor
from millstream.services.ingest.onnx_checks import is_memory, reason
from millstream.services.model.datatypes import BYTES
from millstream.services.model.signature import Signature

Array = np.ndarray[Any, Any]


class TrialError(Exception):
    """A run that failed. `memory`: because there was not enough of it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.memory = is_memory(message)


class Session:
    """Runs the model at `path`. Text is arrays of str here; BF16 is its bits in uint16."""

    def __init__(self, path: Path, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]) -> None:
        self._inputs = inputs
        self._outputs = outputs
        variable = any(not isinstance(dim, int) for port in inputs for dim in port.dims[1:])
        try:
            options = _options(memory_pattern=not variable)  # as workers have it
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            text = reason(str(error), path)
            hint = ": it needs more memory than a check may use" if is_memory(text) else ""
            raise invalid(f"ONNX Runtime cannot load the model{hint}: {text}") from error

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """All outputs, in order, for the inputs in order. Raises TrialError."""
        return self.run_named({port.name: _fed(port, array) for port, array in zip(self._inputs, arrays, strict=True)})

    def run_as_worker(self, signature: Signature, arrays: Mapping[str, Array]) -> list[Array]:
        """The same for inputs by name as workers have them, text as `bytes`. Raises TrialError."""
        datatypes = {spec.name: spec.datatype for spec in signature.inputs}
        return self.run_named({name: _fed_by_worker(datatypes[name], array) for name, array in arrays.items()})

    def run_named(self, feed: Mapping[str, Any]) -> list[Array]:
        """All outputs, in order, for what ONNX Runtime takes, by name. Raises TrialError."""
        names = [port.name for port in self._outputs]
        try:
            if all(port.datatype != "BF16" for port in self._outputs):
                return [np.asarray(output) for output in self._session.run(names, feed)]
            values = {name: _value(fed) for name, fed in feed.items()}
            results = self._session.run_with_ort_values(names, values)
        except Exception as error:
            raise TrialError(reason(str(error)) or type(error).__name__) from error
        pairs = zip(self._outputs, results, strict=True)
        return [_bits(value) if port.datatype == "BF16" else value.numpy() for port, value in pairs]


def _options(*, memory_pattern: bool) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = memory_pattern
    options.log_severity_level = 4
    return options


def _fed(port: ModelTensor, array: Array) -> Any:
    if port.datatype == "BF16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.BFLOAT16)
    return array


def _fed_by_worker(datatype: str, array: Array) -> Any:
    if datatype == BYTES:
        try:
            texts = [element.decode() for element in array.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise TrialError("text that is not UTF-8") from error
        return np.array(texts, dtype=object).reshape(array.shape)
    return _fed(ModelTensor("", datatype, ()), np.ascontiguousarray(array).reshape(array.shape))


def _value(fed: Any) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(fed) if isinstance(fed, np.ndarray) else fed


def _bits(value: Any) -> Array:
    """The 16 bits of each BF16 element: numpy() refuses such values."""
    array = np.empty(value.shape(), np.uint16)
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array
