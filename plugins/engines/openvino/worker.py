"""The OpenVINO backend: serves ONNX files, and blobs that it compiled from them, on the CPU.

load ─> read with the ONNX front end only ─> compile_model ─> one infer request ─> run: copy in ─> infer ─> copy out
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.plugins.engines.worker import MESSAGE_CHARACTERS_MAX, NO_MEMORY, importing
from millstream.services.device import find_device
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.onnxruntime_values import library_message
from millstream.services.model.signature import Signature
from millstream.services.process.process_memory import trim
from millstream.services.repository.variants import Target
from millstream.workers.backends.base import NO_OPTIONS, Array, Options, OutOfMemory, Stop, Terminated
from millstream.workers.backends.engine_parts import CheckedInputs, CpuBackend, check_not_ended

SHAPES_MAX = 512  # operators times shapes whose code OpenVINO keeps; beyond, it compiles that used longest ago again
BLOB = "compiled.variant.blob"  # file name of a compiled model: a variant
OPTIONS = {"threads": int, "precision": str, "dynamic_group": int}  # of a load
GROUP_MAX = 1 << 16  # numbers of an activation that share a scale
PRECISIONS = ("f32", "bf16", "f16")

#: Datatypes whose values OpenVINO's CPU plug-in keeps. It computes INT64 with 32 bits (larger inputs are refused), and
#: would round FP64 to FP32 and cut UINT64 off at 32 bits without an error; text ends its process.
SUPPORTED = frozenset({"BOOL", "UINT8", "UINT16", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32"})

_INT32 = np.iinfo(np.int32)
#: Lines of OpenVINO's messages that name its own source files and conditions.
_LOCATION = re.compile(r"^(Exception from .*|Check '.*' failed at .*|.* failed with \w+:)$", re.MULTILINE)


def _reason(error: Exception, path: Path | None = None) -> str:
    """Return the library's own message on one line, without its source files and the server's folders."""
    text = _LOCATION.sub("", str(error)).strip() or str(error)
    return library_message(text, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__


def _check_options(given: Options) -> None:
    if given.get("precision", "f32") not in PRECISIONS:
        raise invalid(
            f"the option 'precision' of the backend openvino is one of {', '.join(PRECISIONS)}, not "
            f"{given['precision']!r}"
        )
    group = given.get("dynamic_group", 1)
    if not 1 <= int(group) <= GROUP_MAX:
        raise invalid(f"the option 'dynamic_group' of the backend openvino is a number from 1 to {GROUP_MAX}")


def _properties(threads: int, given: Options) -> dict[str, Any]:
    properties = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": given.get("threads", max(1, threads)),
        "NUM_STREAMS": 1,
        # Else it computes in BF16 on CPUs that have it, and answers differ from one machine to the next.
        "INFERENCE_PRECISION_HINT": given.get("precision", "f32"),
        # It keeps code for each operator and each combination of shapes, by default until 5000 of them take gigabytes.
        "CPU_RUNTIME_CACHE_CAPACITY": SHAPES_MAX,
        # Pinned threads of several workers share the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    if "dynamic_group" in given:  # of models with weights of 8 bits; its default differs between releases
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = given["dynamic_group"]
    return properties


def _compile(library: Any, path: Path, properties: Mapping[str, Any], check: Callable[[], None]) -> Any:
    """Return the compiled model of an ONNX file, OpenVINO's own files or a blob; `check` raises Failure meanwhile."""
    core = library.Core()
    if path.name == BLOB:
        with path.open("rb") as file:
            return core.import_model(file.read(), "CPU", properties)
    # `read_model` asks every front end, also those that read other formats.
    front_end = library.frontend.FrontEndManager().load_by_framework("ir" if path.suffix == ".xml" else "onnx")
    model = front_end.convert(front_end.load(str(path)))
    check()
    return core.compile_model(model, "CPU", properties)


class OpenVinoInstance:
    """A compiled model with one infer request, whose tensors are reused from run to run.

    Raises Failure(MODEL) in its constructor if the model lacks a tensor of the signature, or has another datatype.
    """

    lost = ""

    def __init__(self, library: Any, compile_model: Callable[[], Any], signature: Signature, file: str) -> None:
        self._library = library
        self._compile = compile_model
        self._file = file
        self._checked = CheckedInputs("OpenVINO", signature)
        self._inputs = {spec.name: spec.datatype for spec in signature.inputs}
        self._outputs = [(spec.name, spec.datatype) for spec in signature.outputs]
        self._terminating = False
        self.size_bytes = 0
        self._open()

    def _open(self) -> None:
        self._model = self._compile()
        names = {name for port in (*self._model.inputs, *self._model.outputs) for name in port.get_names()}
        missing = [name for name in (*self._inputs, *dict(self._outputs)) if name not in names]
        if missing:
            raise Failure(Code.MODEL, f"OpenVINO: {self._file} has no tensor {missing[0]!r}")
        self._request = self._model.create_infer_request()
        self._tensors = {name: self._new_tensor(name) for name in self._inputs}

    def _new_tensor(self, name: str) -> Any:
        port = self._model.input(name)
        shape = [0 if dim.is_dynamic else dim.get_length() for dim in port.get_partial_shape()]
        tensor = self._library.Tensor(port.get_element_type(), shape)
        self._request.set_tensor(name, tensor)
        return tensor

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        request = self._request
        if request is None:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        self._check(inputs)
        try:
            for name, array in inputs.items():
                self._fill(name, array)
            # `infer` takes 0.1 ms less, but cannot be cancelled.
            request.start_async()
            request.wait()
            return [self._taken(request, name, datatype) for name, datatype in self._outputs]
        except MemoryError as error:
            raise OutOfMemory("OpenVINO: out of memory") from error
        except Exception as error:
            if self._terminating:
                self._terminating = False  # else it would apply to all further runs
                self.rebuild()  # the shapes within a cancelled model are those of its unfinished run
                raise Terminated from error
            reason = _reason(error)
            if NO_MEMORY.search(reason):
                raise OutOfMemory(f"OpenVINO: out of memory: {reason}") from error
            raise Failure(Code.MODEL, f"OpenVINO: {reason}") from error

    def _check(self, inputs: Mapping[str, Array]) -> None:
        """Raise Failure for inputs that OpenVINO would convert, cut off, or replace by those of the last run."""
        self._checked.check(inputs)
        for name, array in inputs.items():
            datatype = self._inputs[name]
            if datatype == "INT64" and array.size and not _INT32.min <= array.min() <= array.max() <= _INT32.max:
                raise Failure(
                    Code.MODEL, f"OpenVINO computes INT64 with 32 bits, and input {name!r} has larger numbers"
                )

    def _fill(self, name: str, array: Array) -> None:
        tensor = self._tensors[name]
        if tuple(tensor.shape) != array.shape:
            tensor.shape = array.shape
            self._request.set_tensor(name, tensor)
        if array.size:
            _bits(tensor, self._inputs[name])[...] = array

    def _taken(self, request: Any, name: str, datatype: str) -> Array:
        """Return a copy of an output, since the next run writes to the same memory."""
        found = _bits(request.get_tensor(name), datatype).copy()
        if found.dtype != NUMPY[datatype]:
            raise Failure(Code.MODEL, f"OpenVINO: output {name!r} is {found.dtype}, not {datatype}")
        return found

    def exported(self) -> bytes:
        """Return the compiled model in a form that `load` takes."""
        content: bytes = self._model.export_model().getvalue()
        return content

    def terminate(self) -> None:
        request = self._request
        if request is not None:
            self._terminating = True
            request.cancel()

    def rebuild(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self._request = self._model = None
        self._tensors = {}
        trim()


def _bits(tensor: Any, datatype: str) -> Array:
    """Return the memory of a tensor; a BF16 tensor's as uint16, which the library shows as float16."""
    data: Array = tensor.data
    return data.view(np.uint16) if datatype == "BF16" else data


class OpenVino(CpuBackend):
    """Loads ONNX files, and blobs that `compile_to` wrote, on the CPU."""

    name, title = "openvino", "OpenVINO"
    known = OPTIONS
    formats = frozenset({"onnx", "openvino"})

    def prepare(self, device: str) -> None:
        """Import openvino. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def target(self, device: str) -> Target | None:
        """Return what a blob is for."""
        return Target("openvino-cpu", f"openvino {_library().get_version()}", find_device(device).fingerprint)

    def compile(self, path: Path, folder: Path, signature: Signature, device: str, threads: int) -> list[str]:
        """Write the model as OpenVINO compiles it for this processor."""
        self.check_signature(signature)
        instance = self.open(path, signature, threads, NO_OPTIONS, None)
        (folder / BLOB).write_bytes(instance.exported())
        instance.close()
        return [BLOB]

    def check_signature(self, signature: Signature) -> None:
        """Raise Failure(MODEL) if a tensor has a type that OpenVINO does not compute on a CPU."""
        for spec in (*signature.inputs, *signature.outputs):
            if spec.datatype not in SUPPORTED:
                raise Failure(
                    Code.MODEL,
                    f"OpenVINO does not compute {spec.datatype} ({spec.name!r}) on a CPU: serve this version by the "
                    "backend onnxruntime",
                )

    def open(
        self, path: Path, signature: Signature, threads: int, options: Options, stop: Stop | None
    ) -> OpenVinoInstance:
        """Compile the model with `threads` threads. Raises Failure(MODEL) or Failure(UNAVAILABLE).

        The compilation itself cannot be ended early: `stop` takes effect before and after it.
        """
        _check_options(options)
        library = _library()
        properties = _properties(threads, options)

        def compile_model() -> Any:
            check_not_ended(stop)
            try:
                model = _compile(library, path, properties, lambda: check_not_ended(stop))
            except Failure:
                raise
            except MemoryError as error:
                raise _too_large(path, error) from error
            except Exception as error:
                if NO_MEMORY.search(str(error)):
                    raise _too_large(path, error) from error
                raise Failure(Code.MODEL, f"OpenVINO cannot load {path.name}: {_reason(error, path)}") from error
            check_not_ended(stop)
            return model

        _check_readable(path)
        return OpenVinoInstance(library, compile_model, signature, path.name)


def _library() -> Any:
    reporter = "openvino_telemetry"  # reports each import to its makers; without it OpenVINO uses a stub
    known = sys.modules.get(reporter, ...)
    sys.modules[reporter] = None  # type: ignore[assignment]
    try:
        with importing("openvino", "openvino", "openvino"):
            import openvino
            import openvino.frontend
    finally:
        if known is ...:
            del sys.modules[reporter]
        else:
            sys.modules[reporter] = known
    return openvino


def _check_readable(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        raise Failure(Code.MODEL, f"the model cannot be loaded: {path.name}: {error.strerror}") from error


def _too_large(path: Path, error: Exception) -> OutOfMemory:
    trim()
    return OutOfMemory(f"there is no memory for the model: {_reason(error, path)}")
