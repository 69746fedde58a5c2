"""The module that models of Triton's Python backend import as `triton_python_backend_utils`.

Imported under that name in the process of a model (program.py); numpy of its environment is all that it needs.
Names, arguments and the texts of errors are those of Triton: python_backend, src/pb_stub.cc and src/resources.
"""

from __future__ import annotations

import enum
import json
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.plugins.functions.triton.model_config import ModelConfig
from millstream.plugins.functions.triton.model_metrics import Metric, MetricFamily, TritonModelException

__all__ = ["Metric", "MetricFamily", "ModelConfig", "TritonModelException"]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

#: numbers of Triton's datatypes, from 1 on
_NUMPY: tuple[Any, ...] = (
    np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32,
    np.float64, np.object_,
)  # fmt: skip
_NAMES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "STRING",
)  # fmt: skip
TRITON_STRING_TO_NUMPY: dict[str, Any] = {f"TYPE_{name}": kind for name, kind in zip(_NAMES, _NUMPY, strict=True)}
TRITON_STRING_TO_NUMPY["TYPE_BOOL"] = bool
_LENGTH = struct.Struct("<I")


def triton_to_numpy_type(data_type: int) -> Any:
    return _NUMPY[data_type - 1] if 1 <= data_type <= len(_NUMPY) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    if data_type == np.bytes_:
        return len(_NUMPY)
    return next((number for number, kind in enumerate(_NUMPY, 1) if data_type == kind), None)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def _as_bytes(element: Any) -> bytes:
    return element if isinstance(element, bytes) else str(element).encode()


def serialize_byte_tensor(input_tensor: Any) -> Any:
    """Return the elements of an array of text, each behind its length; None for other arrays."""
    if not input_tensor.size:
        return ()
    if input_tensor.dtype != np.object_ and input_tensor.dtype.type != np.bytes_:
        return None
    elements = [_as_bytes(one) for one in input_tensor.ravel().tolist()]
    return b"".join(part for one in elements for part in (_LENGTH.pack(len(one)), one))


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Any:
    """Return what `serialize_byte_tensor` was given, with one dimension."""
    elements, offset = [], 0
    while offset < len(encoded_tensor):
        [length] = _LENGTH.unpack_from(encoded_tensor, offset)
        offset += _LENGTH.size + length
        elements.append(bytes(encoded_tensor[offset - length : offset]))
    return np.array(elements, dtype=np.object_)


def _named(tensors: Sequence[Any], name: str) -> Any:
    return next((one for one in tensors if one.name() == name), None)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Any:
    return _named(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Any:
    return _named(inference_response.output_tensors(), name)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((one for one in model_config.get("input", ()) if one["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    return next((one for one in model_config.get("output", ()) if one["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _check(value: Any, kind: type | tuple[type, ...], what: str) -> None:
    """Raise TypeError as a function in C++ does that is given another type."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise TypeError(f"incompatible function arguments: {what} cannot be {type(value).__name__}")


def _text(value: Any, what: str) -> str:
    """Return a text that may be given as bytes, as to a function in C++. Raises TypeError."""
    _check(value, (str, bytes), what)
    return value.decode() if isinstance(value, bytes) else str(value)


class TritonError:
    """An error of one response, with its code."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = 0, 1, 2, 3
    UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = 4, 5, 6, 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        _check(code, int, "code")
        self._message, self._code = _text(message, "message"), code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message


class PreferredMemory:
    """Where the answer of a call should be: accepted, and the answer is in memory of the CPU."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.memory_type, self.device_id = preferred_memory_type, preferred_device_id


TRITONSERVER_MEMORY_GPU, TRITONSERVER_MEMORY_CPU = 0, 1


class InferenceTrace:
    """The trace of a request. `context`: of OpenTelemetry, in JSON; None: there is none."""

    def __init__(self, context: str | None = None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        return self._context


class Tensor:
    """A named array. It is in memory of the CPU."""

    def __init__(self, name: str, numpy_array: Any) -> None:
        name = _text(name, "name")
        _check(numpy_array, np.ndarray, "numpy_array")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        number = numpy_to_triton_type(numpy_array.dtype.type)
        if numpy_array.dtype.kind == "U":
            number = len(_NUMPY)
        if number is None:
            raise TritonModelException(f"Numpy dtype is not supported: {numpy_array.dtype}")
        self._name, self._array, self._number = name, numpy_array, number

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array

    def triton_dtype(self) -> int:
        return self._number

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self._array.dtype.kind in "OSU":
            raise TritonModelException("DLPack does not have support for string tensors.")
        array = self._array if self._array.flags.writeable else self._array.copy()
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if isinstance(tensor, Tensor):
            return Tensor(name, tensor.as_numpy())
        if type(tensor).__name__ == "PyCapsule":
            tensor = _Capsule(tensor)
        if not (hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__")):
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
                "`__dlpack_device__` attributes"
            )
        array = np.from_dlpack(tensor)
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
                "supported."
            )
        return Tensor(name, array)


class _Capsule:
    """A capsule of memory of the CPU, as numpy takes it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _parameters(given: Any) -> str:
    """Return the JSON of parameters. Raises TritonModelException."""
    if given is None:
        return ""
    if not isinstance(given, dict):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(given)}")
    for key, value in given.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return json.dumps(given)


class InferenceResponse:
    """What is answered to one request: tensors, or an error."""

    def __init__(
        self,
        output_tensors: Any = (),
        error: TritonError | None = None,
        parameters: Any = None,
    ) -> None:
        _check(output_tensors, (list, tuple), "output_tensors")
        if any(one is None for one in output_tensors):
            raise TritonModelException("Output tensor for inference response should not be empty.")
        if error is not None:
            _check(error, TritonError, "error")
        self._tensors, self._error, self._parameters = list(output_tensors), error, _parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return self._parameters


class InferenceRequest:
    """A request: one that `execute` gets, or one that a model makes to call another model."""

    _answer: Answer | None = None  # of one that `execute` got
    _release = TRITONSERVER_REQUEST_RELEASE_ALL

    def __init__(  # noqa: PLR0913 - as Triton has it
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Any = None,
        requested_output_names: Any = None,
        model_name: Any = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Any = None,
    ) -> None:
        for value, kind, what in (
            (correlation_id, (int, str), "correlation_id"),
            (inputs, list, "inputs"),
            (requested_output_names, list, "requested_output_names"),
            (model_version, int, "model_version"),
            (flags, int, "flags"),
            (timeout, int, "timeout"),
        ):
            _check(value, kind, what)
        request_id, model_name = _text(request_id, "request_id"), _text(model_name, "model_name")
        requested_output_names = [_text(name, "requested_output_names") for name in requested_output_names]
        if any(one is None for one in inputs):
            raise TritonModelException(
                f"Input tensor for request with id '{request_id}' and model name '{model_name}' should not be empty."
            )
        if any(not one for one in requested_output_names):
            raise TritonModelException(
                f"Requested output name for request with id '{request_id}' and model name '{model_name}' should not "
                "be empty."
            )
        self._id, self._correlation_id, self._inputs = request_id, correlation_id, list(inputs)
        self._wanted, self._model, self._version = list(requested_output_names), model_name, model_version
        self._flags, self._timeout, self._parameters = flags, timeout, _parameters(parameters)
        self._trace = trace or InferenceTrace()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._wanted

    def model_name(self) -> str:
        return str(self._model)

    def model_version(self) -> int:
        return self._version

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return self._parameters

    def told_parameters(self, given: Any) -> None:
        """Take the parameters of a caller, which may have numbers of any kind."""
        self._parameters = json.dumps(given) if given else ""

    def trace(self) -> InferenceTrace:
        return self._trace

    def set_release_flags(self, flags: int) -> None:
        _check(flags, int, "flags")
        if flags not in {TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE}:
            raise TritonModelException(
                "Unable to set request release flags. Setting release flags is currently limited to "
                "TRITONSERVER_REQUEST_RELEASE_ALL and TRITONSERVER_REQUEST_RELEASE_RESCHEDULE."
            )
        self._release = flags

    def is_cancelled(self) -> bool:
        return self._answer is not None and self._answer.is_cancelled()

    def get_response_sender(self) -> ResponseSender:
        if self._answer is None:
            raise TritonModelException("a request that calls another model has no response sender")
        return ResponseSender(self._answer)

    def exec(self, decoupled: bool = False) -> Any:
        raise _refused_call(f"exec of '{self._model}'")

    async def async_exec(self, decoupled: bool = False) -> Any:
        raise _refused_call(f"async_exec of '{self._model}'")


class Answer:
    """The one response of a request of `execute`, from whichever thread it comes."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self.is_cancelled = is_cancelled
        self._changed = threading.Condition()
        self._senders = 0
        self._response: InferenceResponse | None = None
        self._closed = False

    @property
    def sent(self) -> InferenceResponse | None:
        """The response, if it was sent."""
        return self._response

    def opened(self) -> None:
        with self._changed:
            self._senders += 1

    def dropped(self) -> None:
        """Note that a sender is gone."""
        with self._changed:
            self._senders -= 1
            self._changed.notify_all()

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Take a response. Raises TritonModelException as Triton does."""
        with self._changed:
            if response is not None and self._response is not None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if response is None and self._response is None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
            if self._closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._closed = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self._response = response or self._response
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more responses: the request was answered."""
        with self._changed:
            self._closed = True

    def wait(self) -> InferenceResponse | None:
        """Return the response, which a thread of the model may still send; None: nothing is left that could."""
        with self._changed:
            while self._response is None and self._senders > 0:
                self._changed.wait(0.1)
            return self._response


class ResponseSender:
    """Sends the one response of a request."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        answer.opened()

    def __del__(self) -> None:
        self._answer.dropped()

    def is_cancelled(self) -> bool:
        return self._answer.is_cancelled()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in {0, TRITONSERVER_RESPONSE_COMPLETE_FINAL}:
            raise TritonModelException(
                f"Unable to send response. Unsupported flag '{flags}' is provided. Please use either "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL or 0."
            )
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None:
            _check(response, InferenceResponse, "response")
        self._answer.send(response, flags)


class _LogLevel(enum.Enum):
    """Of a line of the log."""

    INFO, WARNING, ERROR, VERBOSE = "info", "warning", "error", "verbose"


class Logger:
    """Writes lines of the log, which are in the log of the worker."""

    LogLevel = _LogLevel
    INFO, WARNING, ERROR, VERBOSE = _LogLevel.INFO, _LogLevel.WARNING, _LogLevel.ERROR, _LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: _LogLevel = _LogLevel.INFO) -> None:
        _check(message, str, "message")
        _check(level, _LogLevel, "level")
        if level is not _LogLevel.VERBOSE:
            print(message if level is _LogLevel.INFO else f"{level.value}: {message}", flush=True)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, _LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, _LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, _LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, _LogLevel.VERBOSE)


def _refused_call(what: str) -> TritonModelException:
    return TritonModelException(
        f"{what}: calls of other models from a model (BLS) are not served; connect the models by an ensemble, or by a "
        "graph, whose steps may have conditions"
    )


def load_model(model_name: str, config: str = "", files: Any = None) -> None:  # noqa: ARG001
    raise TritonModelException(
        f"load_model of '{model_name}' is not served: models are loaded by their operator, as a model is no operator"
    )


def unload_model(model_name: str, unload_dependents: bool = False) -> None:  # noqa: ARG001
    raise TritonModelException(f"unload_model of '{model_name}' is not served: models are unloaded by their operator")


def is_model_ready(model_name: str, model_version: str = "") -> bool:  # noqa: ARG001
    raise _refused_call(f"is_model_ready of '{model_name}'")
