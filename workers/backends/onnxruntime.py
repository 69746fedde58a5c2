"""The ONNX Runtime backend: serves ONNX files on the CPU, on CUDA and on TensorRT.

load ─> session on exactly the requested device ─> run: numpy in ─> (text, BF16 converted) ─> session ─> numpy out
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.device import GpuMemory, find_device
from millstream.services.environment import disable_library_telemetry
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.datatypes import BYTES
from millstream.services.model.onnx_file import external_tensors
from millstream.services.model.onnxruntime_values import bf16_bits, library_message, text_array
from millstream.services.model.signature import Signature
from millstream.services.process.process_memory import return_freed
from millstream.services.process.threads import lower_priority
from millstream.services.repository.variants import Target
from millstream.workers.backends.base import (
    NO_OPTIONS,
    Array,
    Options,
    OutOfMemory,
    Stop,
    Terminated,
    Value,
    check_options,
)
from millstream.workers.backends.engine_parts import whole_import
from millstream.workers.backends.gpu import (
    CPU,
    DeviceBuffers,
    EngineReport,
    GraphTrial,
    describe_gpu,
    engines_key,
    load_tensorrt,
    parse_device,
    providers,
    tensorrt_version,
)

MESSAGE_CHARACTERS_MAX = 1000

#: Messages of ONNX Runtime and its providers for a failed allocation.
_NO_MEMORY = re.compile(r"bad_alloc|failed to allocate|out of memory|cudaErrorMemoryAllocation", re.IGNORECASE)
#: File name of a model as ONNX Runtime optimised it: a variant.
OPTIMISED = "optimised.variant.onnx"
#: Its weights of at least so many bytes, if those of the model are in files of their own.
WEIGHTS = "optimised.variant.onnx.data"
WEIGHT_BYTES_MIN = 1024
#: Options of a load. `optimised`: all optimisations are in the file, those for this processor included. `provider`: the
#: execution provider of a GPU, where it is not the one that the device names.
OPTIONS = {
    "threads": int, "arena": bool, "memory_pattern": bool, "optimised": bool, "arm64_bf16": bool, "provider": str,
}  # fmt: skip
PROVIDERS = ("cuda", "tensorrt")
#: Severity of what ONNX Runtime logs outside of sessions: on a GPU it warns at every load and at every change of graph.
_ERRORS = 3
#: TensorProto.BFLOAT16; a number, because the onnx package is not needed to serve.
_BFLOAT16 = 16


def _reason(error: Exception, path: Path | None = None) -> str:
    """Return the library's own message on one line, without its prefix and the server's folders."""
    return library_message(error, path, MESSAGE_CHARACTERS_MAX) or type(error).__name__


def _options(runtime: Any, signature: Signature, threads: int, given: Options = NO_OPTIONS) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = int(given.get("threads", max(1, threads)))
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    level = runtime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_DISABLE_ALL if given.get("optimised") else level.ORT_ENABLE_ALL
    # Spinning threads would use the core that the gateway and Redis need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # An arena keeps the peak memory of each session and was not faster than malloc, which all sessions share.
    options.enable_cpu_mem_arena = bool(given.get("arena", False))
    # A memory pattern is stored for every combination of input shapes, so it is used only if their number is bounded.
    fixed_from = 1 if signature.batching else 0
    bounded = all(-1 not in spec.shape[fixed_from:] for spec in signature.inputs)
    options.enable_mem_pattern = bool(given.get("memory_pattern", bounded))
    if given.get("arm64_bf16"):  # products of matrices of FP32 in BF16, on Arm processors that have it
        options.add_session_config_entry("mlas.enable_gemm_fastmath_arm64_bfloat16", "1")
    # Errors are raised; the log would repeat every caller's mistake.
    options.log_severity_level = 4
    return options


def _library() -> Any:
    disable_library_telemetry()
    try:
        with whole_import("onnxruntime"):
            import onnxruntime
    except ImportError as error:
        raise Failure(
            Code.UNAVAILABLE,
            f"onnxruntime cannot be imported ({error}): install millstream[cpu] or millstream[gpu]",
        ) from error
    onnxruntime.set_default_logger_severity(_ERRORS)
    return onnxruntime


def _check_readable(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        raise Failure(Code.MODEL, f"the model cannot be loaded: {path.name}: {error.strerror}") from error


def _too_large(error: Exception, path: Path, *, of_device: bool = False) -> OutOfMemory:
    return_freed()
    return OutOfMemory(f"there is no memory for the model: {_reason(error, path)}", of_device=of_device)


def _on_provider(device: str, provider: Value) -> str:
    """Return the name of a GPU with another execution provider. Raises Failure(INVALID) for a CPU."""
    kind, number = parse_device(device)
    if provider not in PROVIDERS or kind == "cpu":
        raise invalid(f"the option 'provider' is one of {', '.join(PROVIDERS)}, on a GPU; not {provider!r} on {device}")
    return f"{provider}:{number}"


class _LowerPriority:
    """An empty collection that lowers the priority of the thread which reads it."""

    def __iter__(self) -> Iterator[str]:
        lower_priority()
        return iter(())


def check_available(runtime: Any, device: str, wanted: Sequence[str]) -> None:
    """Raise Failure(UNAVAILABLE) if the installed package lacks an execution provider of a device."""
    absent = [name for name in wanted if name not in runtime.get_available_providers()]
    if absent:
        raise Failure(
            Code.UNAVAILABLE,
            f"device {device!r} needs {absent[0]}, which the installed onnxruntime does not have: "
            "install millstream[gpu] in place of millstream[cpu]",
        )


def _open(runtime: Any, path: Path, options: Any, device: str, providers: list[tuple[str, dict[str, Any]]]) -> Any:
    """Return a session on `device`, or raise Failure; ONNX Runtime itself would silently use the CPU instead.

    In a thread other than the main one, the work is done at low priority, which the thread keeps. The session's own
    threads must not inherit that, since they serve later: `disabled_optimizers` is read when they have started, and
    before the graph is optimised.

    Single operators without a kernel for the device may still run on the CPU (shape arithmetic belongs there), so
    session.disable_cpu_ep_fallback stays off; the device's provider must be active.
    """
    wanted = [name for name, _ in providers]
    check_available(runtime, device, wanted)
    state = runtime.capi.onnxruntime_pybind11_state
    if options.intra_op_num_threads == 1:
        lower_priority()  # before the file is read: the session starts no threads
    try:
        session = runtime.InferenceSession(
            path, options, providers=providers, enable_fallback=0, disabled_optimizers=_LowerPriority()
        )
    except MemoryError as error:
        raise _too_large(error, path) from error
    except (state.EPFail, state.EngineError, state.RuntimeException, RuntimeError) as error:
        if _NO_MEMORY.search(str(error)):
            raise _too_large(error, path, of_device=device != "cpu" and "bad_alloc" not in str(error)) from error
        if device == "cpu":
            raise Failure(Code.MODEL, f"the model cannot be loaded: {_reason(error, path)}") from error
        raise Failure(Code.UNAVAILABLE, f"device {device!r} cannot be used: {_reason(error, path)}") from error
    except Exception as error:
        if _NO_MEMORY.search(str(error)):
            raise _too_large(error, path, of_device=device != "cpu" and "bad_alloc" not in str(error)) from error
        raise Failure(Code.MODEL, f"the model cannot be loaded: {_reason(error, path)}") from error
    missing = [name for name in wanted if name not in session.get_providers()]
    if missing:
        raise Failure(
            Code.UNAVAILABLE,
            f"device {device!r} cannot be used: {missing[0]} did not start; look for a missing driver, device or "
            "library in the lines that ONNX Runtime logged above",
        )
    session.disable_fallback()
    return session


def _to_text(name: str, array: Array) -> Array:
    """Convert an object array of bytes to str, the only text that ONNX Runtime's Python API takes."""
    elements = array.ravel().tolist()
    try:
        return text_array(elements, array.shape)
    except UnicodeDecodeError as error:
        index = elements.index(error.object)
        raise invalid(f"input {name!r}: element {index} is not UTF-8, and ONNX Runtime takes no other text") from error


def _to_bytes(array: Array) -> Array:
    return np.array([text.encode() for text in array.ravel().tolist()], dtype=object).reshape(array.shape)


class OnnxRuntimeInstance:
    """An ONNX Runtime session that converts text and BF16 as its signature needs."""

    lost = ""

    def __init__(
        self,
        runtime: Any,
        open_session: Callable[[], Any],
        signature: Signature,
        make_buffers: Callable[[Any], DeviceBuffers] | None = None,
    ) -> None:
        self._value = runtime.OrtValue
        self._options = runtime.RunOptions()
        self._options.log_severity_level = 4  # as for the session
        self._open = open_session
        self._make_buffers = make_buffers
        self._buffers: DeviceBuffers | None = None
        self.on_close: Callable[[], None] = lambda: None
        self.size_bytes = 0
        self._datatypes = {spec.name: spec.datatype for spec in signature.inputs}
        self._outputs = [spec.name for spec in signature.outputs]
        self._output_datatypes = [spec.datatype for spec in signature.outputs]
        converted = {BYTES, "BF16"}
        self._plain = converted.isdisjoint([*self._datatypes.values(), *self._output_datatypes])
        self._session: Any = None
        self._start()

    def _start(self) -> None:
        self._session = self._open()
        if self._make_buffers is not None and self._plain:
            self._buffers = self._make_buffers(self._session)

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        session = self._session
        if session is None:
            raise Failure(Code.UNAVAILABLE, "the model was unloaded")
        try:
            if self._buffers is not None and self._buffers.takes(inputs):
                return self._buffers.run(inputs, self._options)
            if self._plain:
                outputs: Sequence[Array] = session.run(self._outputs, inputs, self._options)
                return outputs
            return self._run_converted(session, inputs)
        except Failure:
            raise
        except MemoryError as error:
            raise OutOfMemory("ONNX Runtime: out of memory") from error
        except Exception as error:
            if self._options.terminate:
                self._options.terminate = False  # else it would apply to all further runs
                raise Terminated from error
            reason = _reason(error)
            if _NO_MEMORY.search(reason):
                raise OutOfMemory(f"ONNX Runtime: out of memory: {reason}") from error
            # an operator refuses its operands, which depend on the inputs: an index outside of a table, for example
            code = Code.INVALID if type(error).__name__ == "InvalidArgument" else Code.MODEL
            raise Failure(code, f"ONNX Runtime: {reason}") from error

    def _run_converted(self, session: Any, inputs: Mapping[str, Array]) -> Sequence[Array]:
        feed = {name: self._to_feed(name, array) for name, array in inputs.items()}
        if "BF16" not in self._output_datatypes:
            outputs = session.run(self._outputs, feed, self._options)
            pairs = zip(self._output_datatypes, outputs, strict=True)
            return [_to_bytes(array) if datatype == BYTES else array for datatype, array in pairs]
        values = {
            name: self._value.ortvalue_from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in feed.items()
        }
        results = session.run_with_ort_values(self._outputs, values, self._options)
        pairs = zip(self._output_datatypes, results, strict=True)
        return [bf16_bits(value) if datatype == "BF16" else value.numpy() for datatype, value in pairs]

    def _to_feed(self, name: str, array: Array) -> Any:
        datatype = self._datatypes.get(name)
        if datatype == BYTES:
            return _to_text(name, array)
        # An OrtValue uses the array's memory directly, so the array must be contiguous.
        ordered = np.asarray(array, order="C")
        if datatype == "BF16":
            return self._value.ortvalue_from_numpy_with_onnx_type(ordered, _BFLOAT16)
        return ordered

    def terminate(self) -> None:
        self._options.terminate = True

    def rebuild(self) -> None:
        self.close()
        return_freed()  # memory was short
        self._start()

    def close(self) -> None:
        if self._session is not None:
            self.on_close()
        self._session = None
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None  # it has the session, whose memory is free once nothing refers to it


class OnnxRuntime:
    """Loads ONNX files.

    Args:
        home: the folder for TensorRT engines of models that are stored outside of it. Engines of models inside it,
            and all engines if `home` is None, are stored beside the version's compiled files.
    """

    name = "onnxruntime"
    formats = frozenset({"onnx"})
    forwards = False

    def __init__(self, home: Path | None = None) -> None:
        self._home = home.absolute() if home is not None else None
        self._gpu: GpuMemory | None = None

    def prepare(self, device: str) -> None:
        """Import onnxruntime. Raises Failure(UNAVAILABLE) if it is not installed."""
        _library()

    def load(
        self,
        path: Path,
        signature: Signature,
        device: str,
        threads: int,
        stop: Stop | None = None,
        options: Options = NO_OPTIONS,
    ) -> OnnxRuntimeInstance:
        """Open a session on `device` with `threads` threads. Raises Failure(MODEL) or Failure(UNAVAILABLE).

        `options` as in OPTIONS; Failure(INVALID) for others.
        """
        check_options(self.name, options, OPTIONS)
        onnxruntime = _library()
        _check_readable(path)  # first: a version may be deleted while it is loaded
        if "provider" in options:
            device = _on_provider(device, options["provider"])
        kind, _ = parse_device(device)
        datatypes = {spec.datatype for spec in (*signature.inputs, *signature.outputs)}
        if BYTES in datatypes and any(spec.datatype == "BF16" for spec in signature.outputs):
            raise Failure(Code.MODEL, "ONNX Runtime cannot return BF16 from a model that also has text tensors")
        if path.name == OPTIMISED:
            options = {**options, "optimised": True}
        session = _options(onnxruntime, signature, threads, options)
        if stop is not None:
            stop.on_request(lambda: session.set_load_cancellation_flag(True))
        if kind == "cpu":
            return OnnxRuntimeInstance(onnxruntime, lambda: _open(onnxruntime, path, session, device, [CPU]), signature)
        return self._load_on_gpu(onnxruntime, path, signature, device, session)

    def _load_on_gpu(
        self, onnxruntime: Any, path: Path, signature: Signature, device: str, options: Any
    ) -> OnnxRuntimeInstance:
        kind, number = parse_device(device)
        check_available(onnxruntime, device, [name for name, _ in providers(kind, number, path, graphs=False)])
        onnxruntime.preload_dlls()  # finds the CUDA libraries that pip installed
        engines = self._engines(path)
        report: EngineReport | None = None
        graphs = GraphTrial(signature)
        if kind == "tensorrt":
            load_tensorrt(device)
            gpu, compiler = describe_gpu(device, number), tensorrt_version()
            engines /= engines_key(onnxruntime.__version__, compiler, gpu)
            engines.mkdir(parents=True, exist_ok=True)
            target = Target(
                "onnxruntime-tensorrt",
                f"onnxruntime {onnxruntime.__version__}, tensorrt {compiler}",
                f"{gpu.name}, compute capability {gpu.compute_capability}",
            )
            flags = providers(kind, number, engines, graphs=graphs.on)[0][1]
            report = EngineReport(engines, path, target, {name: flags[name] for name in flags if "path" not in name})

        def open_session() -> Any:
            wanted = providers(kind, number, engines, graphs=graphs.on)
            session = _open(onnxruntime, path, options, device, wanted)
            if graphs.on and not graphs.works(lambda: buffers(session)):
                session = _open(onnxruntime, path, options, device, providers(kind, number, engines, graphs=False))
            return session

        def buffers(session: Any) -> DeviceBuffers:
            return DeviceBuffers(onnxruntime, session, signature, "cuda", number, graphs=graphs.on)

        began = time.monotonic()
        instance = OnnxRuntimeInstance(onnxruntime, open_session, signature, buffers)
        if report is not None:
            report.note(time.monotonic() - began)
            instance.on_close = report.note  # runs of other shapes may have compiled more
        return instance

    def device_bytes(self, device: str) -> int:
        """Return the bytes of the GPU's memory that this process uses, as the driver reports them; 0: a CPU."""
        if parse_device(device)[0] == "cpu":
            return 0
        if self._gpu is None:
            self._gpu = GpuMemory(device)
        return self._gpu.used_bytes()

    def target(self, device: str) -> Target | None:
        """Return what an optimised model is for; None for a GPU: TensorRT keeps its engines itself."""
        if device != "cpu":
            return None
        return Target("onnxruntime-cpu", f"onnxruntime {_library().__version__}", find_device(device).fingerprint)

    def compile(self, path: Path, folder: Path, signature: Signature, device: str, threads: int) -> list[str]:
        """Write the model as ONNX Runtime optimises it for this processor."""
        runtime = _library()
        options = _options(runtime, signature, threads)
        options.optimized_model_filepath = str(folder / OPTIMISED)
        if any(tensor.external for tensor in external_tensors(path)):
            # Otherwise the optimised file would name weights that are beside the model, and not beside itself.
            name = "session.optimized_model_external_initializers"
            options.add_session_config_entry(f"{name}_file_name", WEIGHTS)
            options.add_session_config_entry(f"{name}_min_size_in_bytes", str(WEIGHT_BYTES_MIN))
        _open(runtime, path, options, device, [CPU])
        return [name for name in (OPTIMISED, WEIGHTS) if (folder / name).exists()]

    def _engines(self, path: Path) -> Path:
        """Return the folder for engines of the model at `path`: never a folder that Millstream does not own."""
        if self._home is None or self._home in path.absolute().parents:
            version = path.parent.parent
            return version if version.name == "compiled" else version / "compiled"
        status = path.stat()
        name = hashlib.sha256(f"{path.absolute()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()
        return self._home / "engines" / name[:16]
