"""What the ONNX Runtime backend asks of an NVIDIA GPU: options, memory for runs, keys and reports of engines.

numpy ─> device buffers (kept for each shape) ─> run_with_iobinding ─> output buffers (kept) ─> numpy
load or unload of an instance ─> files in the folder of its engines ─> report.json beside them, replaced as a whole

Without buffers ONNX Runtime allocates device memory for every input and output of every run. With CUDA graphs they are
needed: a graph is recorded with addresses. For devices only: on a CPU the copies would be pure loss.
Nothing here imports ONNX Runtime or reaches a device except `describe_gpu`: the rest is tested without one.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY
from millstream.services.model.manifest import SourceFile
from millstream.services.model.signature import Signature
from millstream.services.model.version_files import describe_file
from millstream.services.repository.variants import FILES_MAX, REPORT, Report, Target
from millstream.workers.backends.base import Array

SHAPES_MAX = 16  # combinations of input shapes whose buffers are kept; beyond, the one used longest ago is freed

Shapes = tuple[tuple[int, ...], ...]


class Buffers(NamedTuple):
    """Memory on the device for one combination of input shapes."""

    binding: Any
    inputs: dict[str, Any]
    outputs: list[Any]  # empty until the first run, whose outputs show their shapes
    graph: int  # its CUDA graph


class DeviceBuffers:
    """The buffers of one session. Not thread-safe.

    Args:
        kind: "cuda", or "cpu" in tests.
        graphs: whether the session records CUDA graphs, one for each combination of shapes.
    """

    def __init__(
        self, runtime: Any, session: Any, signature: Signature, kind: str, number: int, *, graphs: bool = False
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._kind, self._number = kind, number
        self._graphs = graphs
        self._graph_next = 1  # 0 is the default graph, -1 none
        self._chosen: tuple[Any, int] | None = None  # the options of the last run, and the graph that they name
        self._inputs = [(spec.name, NUMPY[spec.datatype]) for spec in signature.inputs]
        self._outputs = [spec.name for spec in signature.outputs]
        fixed_from = 1 if signature.batching else 0
        #: Else the shapes of outputs may depend on values, and their memory is allocated for each run.
        self._keep_outputs = all(-1 not in spec.shape[fixed_from:] for spec in signature.outputs)
        self._known: OrderedDict[Shapes, Buffers] = OrderedDict()

    def takes(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether a run can use buffers: no input is left out, unknown, empty or of another datatype."""
        return len(inputs) == len(self._inputs) and all(
            name in inputs and inputs[name].size and inputs[name].dtype == dtype for name, dtype in self._inputs
        )

    def run(self, inputs: Mapping[str, Array], options: Any) -> Sequence[Array]:
        """Run once with inputs that `takes` accepts. Raises what the library raises."""
        shapes = tuple(inputs[name].shape for name, _ in self._inputs)
        buffers = self._known.get(shapes)
        if buffers is None:
            buffers = self._allocate(shapes)
        else:
            self._known.move_to_end(shapes)
        for name, value in buffers.inputs.items():
            value.update_inplace(np.ascontiguousarray(inputs[name]))
        options = options or self._runtime.RunOptions()
        if self._graphs:
            self._choose_graph(options, buffers.graph if buffers.outputs else -1)
        if not buffers.outputs:
            return self._run_first(buffers, options)
        self._session.run_with_iobinding(buffers.binding, options)
        buffers.binding.synchronize_outputs()
        return [np.array(value.numpy()) for value in buffers.outputs]

    def _choose_graph(self, options: Any, graph: int) -> None:
        """Let the next run record or replay a graph. ONNX Runtime logs a line whenever an entry is written again."""
        if self._chosen != (options, graph):
            options.add_run_config_entry("gpu_graph_id", str(graph))
            self._chosen = (options, graph)

    def _allocate(self, shapes: Shapes) -> Buffers:
        binding = self._session.io_binding()
        inputs = {}
        for (name, dtype), shape in zip(self._inputs, shapes, strict=True):
            value = self._runtime.OrtValue.ortvalue_from_shape_and_type(shape, dtype, self._kind, self._number)
            binding.bind_ortvalue_input(name, value)
            inputs[name] = value
        self._bind_outputs(binding)
        buffers = Buffers(binding, inputs, [], self._graph_next)
        self._graph_next += 1
        self._known[shapes] = buffers
        if len(self._known) > SHAPES_MAX:
            self._known.popitem(last=False)
        return buffers

    def _bind_outputs(self, binding: Any) -> None:
        """Let the library allocate the outputs of the next run on the device."""
        for name in self._outputs:
            binding.bind_output(name, self._kind, self._number)

    def _run_first(self, buffers: Buffers, options: Any) -> list[Array]:
        """Run with outputs that the library allocates, and keep these for the next runs of the same shapes.

        No graph (-1) is recorded: the addresses are not yet final.
        """
        self._session.run_with_iobinding(buffers.binding, options)
        buffers.binding.synchronize_outputs()
        values = buffers.binding.get_outputs()
        found = [np.array(value.numpy()) for value in values]
        if not self._keep_outputs:
            # Else the binding keeps these outputs, and a run whose outputs have other shapes fails.
            buffers.binding.clear_binding_outputs()
            self._bind_outputs(buffers.binding)
            return found
        buffers.outputs.extend(values)
        for name, value in zip(self._outputs, values, strict=True):
            buffers.binding.bind_ortvalue_output(name, value)
        return found

    def close(self) -> None:
        """Free all buffers."""
        self._known.clear()


log = logging.getLogger("millstream.gpu")

TRIAL_RUNS = 3  # one that allocates, one that records, one that replays
DEVICE = re.compile(r"(cpu|cuda|tensorrt)(?::(\d{1,3}))?")
#: What ONNX Runtime's provider is linked to: TensorRT 10, and none of another major version.
TENSORRT_LIBRARIES = ("libnvinfer.so.10", "libnvonnxparser.so.10")
INSTALL_TENSORRT = "pip install 'tensorrt-cu13<11'"
Provider = tuple[str, dict[str, Any]]
CPU: Provider = ("CPUExecutionProvider", {})

_CUDA_NAME_BYTES = 128
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class Gpu(NamedTuple):
    """What an engine was compiled for: TensorRT refuses one of another compute capability, and is slower with one of
    another model.
    """

    name: str
    compute_capability: str  # like "9.0"


def parse_device(device: str) -> tuple[str, int]:
    """Return the kind (cpu, cuda or tensorrt) and number of a device. Raises Failure(UNAVAILABLE) if unknown."""
    match = DEVICE.fullmatch(device)
    if match is None or device.startswith("cpu:"):
        raise Failure(Code.UNAVAILABLE, f"unknown device {device!r}; known: cpu, cuda[:N], tensorrt[:N]")
    return match[1], int(match[2] or 0)


def providers(kind: str, number: int, engines: Path, *, graphs: bool) -> list[Provider]:
    """Return execution providers for a device, its own first.

    Args:
        kind: cpu, cuda or tensorrt.
        number: of the GPU.
        engines: folder of TensorRT's engines and timings.
        graphs: capture CUDA graphs: the shapes of runs repeat, and inputs and outputs stay at the same addresses.
    """
    if kind == "cpu":
        return [CPU]
    # The default, EXHAUSTIVE, tries every algorithm at the first run of each batch size, while a caller waits.
    # An arena that doubles, the default, takes twice what a model needs.
    cuda: dict[str, Any] = {
        "device_id": number,
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
    }
    if kind == "cuda":
        if graphs:
            cuda["enable_cuda_graph"] = "1"
        return [("CUDAExecutionProvider", cuda), CPU]
    tensorrt: dict[str, Any] = {
        "device_id": number,
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": str(engines),
        "trt_timing_cache_enable": True,
        "trt_timing_cache_path": str(engines),
    }
    if graphs:
        tensorrt["trt_cuda_graph_enable"] = True
    return [("TensorrtExecutionProvider", tensorrt), ("CUDAExecutionProvider", cuda), CPU]


def engines_key(runtime_version: str, tensorrt_version: str, gpu: Gpu) -> str:
    """Return the name of the folder for engines: they are for one library, one compiler and one model of GPU."""
    made_for = "\0".join((runtime_version, tensorrt_version, *gpu))
    return f"tensorrt-{hashlib.sha256(made_for.encode()).hexdigest()[:16]}"


def tensorrt_version(version_of: Callable[[str], str] = metadata.version) -> str:
    """Return the version of TensorRT that pip installed; "unknown" if it came in another way."""
    for package in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"):
        try:
            return version_of(package)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def load_tensorrt(device: str, find_module: Callable[[str], ModuleSpec | None] = find_spec) -> None:
    """Load TensorRT, which no search path has where pip installed it. Raises Failure(UNAVAILABLE) if it is absent."""
    spec = find_module("tensorrt_libs")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    for name in TENSORRT_LIBRARIES:
        path = next((folder / name for folder in folders if (folder / name).exists()), name)
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise Failure(
                Code.UNAVAILABLE, f"device {device!r} needs TensorRT 10 ({error}): {INSTALL_TENSORRT}"
            ) from error


class GraphTrial:
    """Decides whether a session records CUDA graphs: if all shapes are fixed, so that they repeat, and a trial works.

    A graph cannot contain operators that run on the CPU or wait for the device.
    """

    def __init__(self, signature: Signature) -> None:
        self.on = not signature.batching and all(
            -1 not in spec.shape for spec in (*signature.inputs, *signature.outputs)
        )
        self._inputs = {spec.name: (spec.shape, spec.datatype) for spec in signature.inputs}
        if any(datatype in {BYTES, "BF16"} for _, datatype in self._inputs.values()):
            self.on = False

    def works(self, buffers: Callable[[], DeviceBuffers]) -> bool:
        """Record a graph and replay it, with zeros; if that fails, `on` is False from now on."""
        zeros = {name: np.zeros(shape, NUMPY[datatype]) for name, (shape, datatype) in self._inputs.items()}
        try:
            trial = buffers()
            for _ in range(TRIAL_RUNS):
                trial.run(zeros, None)
        except Exception as error:
            log.info("no CUDA graphs: %s", " ".join(str(error).split())[:200])
            self.on = False
        return self.on


def describe_gpu(device: str, number: int, open_library: Callable[[str], Any] = ctypes.CDLL) -> Gpu:
    """Return name and compute capability from the CUDA driver. Raises Failure(UNAVAILABLE) without it or the GPU.

    Source: CUDA Driver API, device management.
    """
    try:
        driver = open_library("libcuda.so.1")
    except OSError as error:
        raise Failure(
            Code.UNAVAILABLE, f"device {device!r} cannot be used: there is no CUDA driver ({error})"
        ) from error
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_CUDA_NAME_BYTES)
    steps: tuple[Callable[[], int], ...] = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(handle), number),
        lambda: driver.cuDeviceGetName(name, _CUDA_NAME_BYTES, handle),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle),
        lambda: driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle),
    )
    for step in steps:
        if status := step():
            raise Failure(Code.UNAVAILABLE, f"device {device!r} cannot be used: the CUDA driver says {status}")
    return Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}")


class EngineReport:
    """The report of one folder of engines."""

    def __init__(self, folder: Path, model: Path, target: Target, flags: Mapping[str, object]) -> None:
        self._folder = folder
        self._model = model
        self._target = target
        self._flags = {name: str(value) for name, value in flags.items()}

    def note(self, seconds: float = 0.0) -> None:
        """Write the report if the engines have changed since it was written. Errors are logged: it is only a report.

        Args:
            seconds: that the load took which may have compiled them; 0: unknown.
        """
        try:
            self._note(seconds)
        except (OSError, Failure, ValueError) as error:
            log.warning("the report of the engines in %s cannot be written: %s", self._folder, error)

    def _note(self, seconds: float) -> None:
        names = sorted(one.name for one in self._folder.iterdir() if one.is_file() and one.name != REPORT)[:FILES_MAX]
        path = self._folder / REPORT
        before = _read(path)
        sizes = {name: (self._folder / name).stat().st_size for name in names}
        if not names or (before is not None and {one.path: one.size_bytes for one in before.files} == sizes):
            return
        files: tuple[SourceFile, ...] = tuple(describe_file(self._folder, name) for name in names)
        report = Report(
            digest=describe_file(self._model.parent, self._model.name).sha256,
            target=self._target.name,
            runtime=self._target.runtime,
            device=self._target.device,
            files=files,
            seconds=round(seconds or (before.seconds if before is not None else 0.0), 3),
            flags=self._flags,
        )
        with tempfile.TemporaryDirectory(prefix=".report-", dir=self._folder) as folder:
            new = Path(folder) / REPORT
            new.write_text(report.model_dump_json(indent=1))
            new.replace(path)


def _read(path: Path) -> Report | None:
    try:
        return Report.model_validate_json(path.read_bytes())
    except (OSError, ValueError):  # none, or a damaged one, which is replaced
        return None
