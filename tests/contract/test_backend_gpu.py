"""What the ONNX Runtime backend does for a GPU, without one: options, keys, buffers. tests/gpu needs the device."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from millstream.services.environment import child_environment
from millstream.services.errors import Code, Failure
from millstream.services.repository.folder import FolderRepository
from millstream.workers.backends import onnxruntime as backend_module
from millstream.workers.backends.gpu import (
    SHAPES_MAX,
    TENSORRT_LIBRARIES,
    DeviceBuffers,
    Gpu,
    GraphTrial,
    describe_gpu,
    engines_key,
    load_tensorrt,
    parse_device,
    providers,
    tensorrt_version,
)
from millstream.workers.backends.onnxruntime import OnnxRuntime, OnnxRuntimeInstance
from tests.contract.backend_cases import same, signature
from tests.contract.repositories import publish
from tests.kit import models

MLP = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
H100 = Gpu("NVIDIA H100", "9.0")
CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]
ENGINES = Path("/engines")


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 64)).astype(np.float32)


@pytest.fixture
def session(tmp_path: Path) -> Any:
    return onnxruntime.InferenceSession(models.mlp(tmp_path / "mlp.onnx"), providers=["CPUExecutionProvider"])


def test_devices_have_a_kind_and_a_number() -> None:
    assert [parse_device(text) for text in ("cpu", "cuda", "cuda:3", "tensorrt:1")] == [
        ("cpu", 0),
        ("cuda", 0),
        ("cuda", 3),
        ("tensorrt", 1),
    ]


def test_the_devices_own_provider_comes_first_and_the_cpu_last() -> None:
    assert [name for name, _ in providers("cpu", 0, ENGINES, graphs=False)] == ["CPUExecutionProvider"]
    assert [name for name, _ in providers("cuda", 2, ENGINES, graphs=False)] == CUDA
    assert [name for name, _ in providers("tensorrt", 2, ENGINES, graphs=False)] == ["TensorrtExecutionProvider", *CUDA]


@pytest.mark.parametrize("graphs", [False, True])
def test_options_name_the_gpu_the_engines_and_graphs_if_wanted(graphs: bool) -> None:
    cuda = dict(providers("cuda", 2, ENGINES, graphs=graphs))["CUDAExecutionProvider"]
    tensorrt = dict(providers("tensorrt", 2, ENGINES, graphs=graphs))["TensorrtExecutionProvider"]
    assert cuda["device_id"] == tensorrt["device_id"] == 2
    assert cuda["cudnn_conv_algo_search"] == "HEURISTIC"
    assert tensorrt["trt_engine_cache_enable"]
    assert tensorrt["trt_engine_cache_path"] == tensorrt["trt_timing_cache_path"] == "/engines"
    assert ("enable_cuda_graph" in cuda, "trt_cuda_graph_enable" in tensorrt) == (graphs, graphs)


def test_engines_are_for_one_library_one_compiler_and_one_model_of_gpu() -> None:
    keys = [
        engines_key("1.31", "10.1", H100),
        engines_key("1.32", "10.1", H100),
        engines_key("1.31", "10.2", H100),
        engines_key("1.31", "10.1", H100._replace(name="NVIDIA H200")),
        engines_key("1.31", "10.1", H100._replace(compute_capability="8.0")),
    ]
    assert len(set(keys)) == 5
    assert keys[0] == engines_key("1.31", "10.1", H100)


def test_the_version_of_tensorrt_is_that_of_its_package() -> None:
    def version_of(package: str) -> str:
        if package == "tensorrt-cu13":
            return "10.13"
        raise metadata.PackageNotFoundError

    assert tensorrt_version(version_of) == "10.13"
    assert tensorrt_version(lambda _: "10.9") == "10.9"
    assert tensorrt_version() == "unknown"


class Driver:
    """libcuda.so.1 with one GPU."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        return 0 if number == 0 else 101  # CUDA_ERROR_INVALID_DEVICE

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA H100"
        return 0

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = {75: 9, 76: 0}[attribute]
        return 0


def test_a_gpu_is_described_by_its_driver() -> None:
    assert describe_gpu("tensorrt:0", 0, lambda _: Driver()) == H100
    with pytest.raises(Failure, match="'tensorrt:1' cannot be used: the CUDA driver says 101"):
        describe_gpu("tensorrt:1", 1, lambda _: Driver())


def test_without_a_driver_a_gpu_cannot_be_used() -> None:
    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(Failure, match="there is no CUDA driver") as caught:
        describe_gpu("tensorrt:0", 0, absent)
    assert caught.value.code is Code.UNAVAILABLE


def test_buffers_give_the_same_outputs_for_changing_shapes(session: Any) -> None:
    buffers = DeviceBuffers(onnxruntime, session, MLP, "cpu", 0)
    for seed, count in enumerate((1, 4, 1, 4, 2, 4)):
        given = {"input": rows(count, seed)}
        assert buffers.takes(given)
        (found,) = buffers.run(given, None)
        np.testing.assert_array_equal(found, session.run(None, given)[0])


def test_outputs_stay_as_they_are_when_buffers_are_used_again(session: Any) -> None:
    buffers = DeviceBuffers(onnxruntime, session, MLP, "cpu", 0)
    given = [{"input": rows(3, seed)} for seed in range(3)]
    found = [buffers.run(one, None)[0] for one in given]
    for one, output in zip(given, found, strict=True):
        np.testing.assert_array_equal(output, session.run(None, one)[0])


def test_outputs_whose_shapes_depend_on_values_change_from_run_to_run(tmp_path: Path) -> None:
    session = onnxruntime.InferenceSession(models.blank(tmp_path / "b.onnx"), providers=["CPUExecutionProvider"])
    of = signature([("count", "INT64", (1,))], [("y", "FP32", (-1,))], batching=False)
    buffers = DeviceBuffers(onnxruntime, session, of, "cpu", 0)
    kept = []
    for count in (1000, 2000, 0, 10, 1000):
        (found,) = buffers.run({"count": np.array([count])}, None)
        kept.append(found)
    assert [one.shape for one in kept] == [(1000,), (2000,), (0,), (10,), (1000,)]
    assert not any(one.any() for one in kept)
    with pytest.raises(RuntimeError):
        buffers.run({"count": np.array([1 << 45])}, None)
    assert buffers.run({"count": np.array([3])}, None)[0].shape == (3,)


def test_buffers_are_reused_and_bounded(session: Any) -> None:
    buffers = DeviceBuffers(onnxruntime, session, MLP, "cpu", 0)
    buffers.run({"input": rows(1)}, None)
    [first] = buffers._known.values()
    buffers.run({"input": rows(1, 1)}, None)
    assert list(buffers._known.values()) == [first]
    for count in range(2, SHAPES_MAX + 5):
        buffers.run({"input": rows(count)}, None)
        buffers.run({"input": rows(1)}, None)
    assert len(buffers._known) == SHAPES_MAX
    assert buffers._known[(1, 64),] is first  # used all the time
    buffers.close()
    assert not buffers._known


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"input": rows(0)},
        {"input": rows(1), "other": rows(1)},
        {"other": rows(1)},
        {"input": rows(1).astype(np.float64)},
    ],
)
def test_what_buffers_do_not_take_goes_to_the_session_itself(session: Any, inputs: dict[str, np.ndarray]) -> None:
    assert not DeviceBuffers(onnxruntime, session, MLP, "cpu", 0).takes(inputs)


def test_an_instance_with_buffers_does_what_one_without_does(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "identity.onnx")

    def open_session() -> Any:
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    instance = OnnxRuntimeInstance(
        onnxruntime, open_session, same(), lambda session: DeviceBuffers(onnxruntime, session, same(), "cpu", 0)
    )
    for count in (1, 0, 3):
        given = np.ones((count, 2), np.float32) * count
        assert instance.run({"x": given})[0].tolist() == given.tolist()
    with pytest.raises(Failure, match="missing"):
        instance.run({})
    instance.rebuild()
    assert instance.run({"x": np.ones((2, 2), np.float32)})[0].tolist() == [[1, 1], [1, 1]]
    instance.close()
    with pytest.raises(Failure, match="unloaded"):
        instance.run({"x": np.ones((2, 2), np.float32)})


FIXED = signature([("x", "FP32", (4, 2))], [("y", "FP32", (4, 2))], batching=False)


@pytest.mark.parametrize(
    "of",
    [MLP, signature([("x", "FP32", (-1, 2))], [("y", "FP32", (4, 2))], batching=False)],
    ids=["batching", "variable"],
)
def test_graphs_are_recorded_only_where_shapes_repeat(of: Any) -> None:
    assert not GraphTrial(of).on
    assert GraphTrial(FIXED).on


@pytest.mark.parametrize("works", [True, False])
def test_graphs_are_tried_before_a_gpu_serves_and_left_out_if_they_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """The device call is replaced by the CPU; everything around it is the product's."""
    opened: list[dict[str, Any]] = []
    path = models.identity(tmp_path / "identity.onnx", shape=(4, 2))

    def open_on_cpu(runtime: Any, path: Path, options: Any, device: str, wanted: Any) -> Any:
        opened.append(dict(wanted))
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    class OnCpu(DeviceBuffers):
        def __init__(self, runtime: Any, session: Any, of: Any, kind: str, number: int, *, graphs: bool) -> None:
            assert (kind, number) == ("cuda", 1)
            super().__init__(runtime, session, of, "cpu", 0)
            self.graphs = graphs

        def run(self, inputs: Any, options: Any) -> Any:
            if self.graphs and not works:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().run(inputs, options)

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: CUDA)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    monkeypatch.setattr(backend_module, "_open", open_on_cpu)
    monkeypatch.setattr(backend_module, "DeviceBuffers", OnCpu)
    instance = OnnxRuntime(tmp_path).load(path, FIXED, "cuda:1", 1)
    assert ["enable_cuda_graph" in one["CUDAExecutionProvider"] for one in opened] == (
        [True] if works else [True, False]
    )
    given = np.ones((4, 2), np.float32)
    assert instance.run({"x": given})[0].tolist() == given.tolist()


def test_tensorrt_is_found_where_pip_installed_it_or_its_package_is_named(tmp_path: Path) -> None:
    """The folder has the C library under the names of TensorRT's: what is loaded is the file, not a search's find."""
    libc = next(
        Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
    )
    for name in TENSORRT_LIBRARIES:
        (tmp_path / name).symlink_to(libc)
    spec = ModuleSpec("tensorrt_libs", None, is_package=True)
    assert spec.submodule_search_locations is not None
    spec.submodule_search_locations.append(str(tmp_path))
    load_tensorrt("tensorrt:0", lambda _: spec)
    (tmp_path / TENSORRT_LIBRARIES[1]).unlink()
    with pytest.raises(Failure, match=r"'tensorrt:0' needs TensorRT 10 .*pip install 'tensorrt-cu13<11'") as caught:
        load_tensorrt("tensorrt:0", lambda _: spec)
    assert caught.value.code is Code.UNAVAILABLE


def test_tensorrt_engines_are_kept_under_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["TensorrtExecutionProvider", *CUDA]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    monkeypatch.setattr(backend_module, "describe_gpu", lambda device, number: H100)
    monkeypatch.setattr(backend_module, "load_tensorrt", lambda device: None)
    version = tmp_path / "repository" / "models" / "m" / "1"
    (version / "source").mkdir(parents=True)
    path = models.identity(version / "source" / "model.onnx")
    with pytest.raises(Failure, match=r"cannot be (used|loaded)"):  # it is not really there
        OnnxRuntime(tmp_path).load(path, same(), "tensorrt:0", 1)
    assert [one.name for one in (version / "compiled").iterdir()] == [
        engines_key(onnxruntime.__version__, tensorrt_version(), H100)
    ]


def test_engines_have_a_report_that_follows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is replaced: it writes a file at the load, and one when a run has a new shape."""
    listed = ["TensorrtExecutionProvider", *CUDA]

    def open_and_compile(runtime: Any, path: Path, options: Any, device: str, wanted: Any) -> Any:
        (Path(dict(wanted)["TensorrtExecutionProvider"]["trt_engine_cache_path"]) / "a.engine").write_bytes(b"first")
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    monkeypatch.setattr(backend_module, "describe_gpu", lambda device, number: H100)
    monkeypatch.setattr(backend_module, "load_tensorrt", lambda device: None)
    monkeypatch.setattr(backend_module, "tensorrt_version", lambda: "10.13")
    monkeypatch.setattr(backend_module, "_open", open_and_compile)
    repository = FolderRepository(tmp_path / "repository")
    publish(repository)
    manifest = repository.manifest("digits", 1)
    path = models.identity(repository.folder_of(manifest) / "source" / "model.onnx")
    instance = OnnxRuntime(tmp_path).load(path, same(), "tensorrt:0", 1)
    [(name, report)] = repository.variants.reports(manifest).items()
    assert name == engines_key(onnxruntime.__version__, "10.13", H100)
    assert report.target == "onnxruntime-tensorrt"
    assert report.runtime == f"onnxruntime {onnxruntime.__version__}, tensorrt 10.13"
    assert report.device == "NVIDIA H100, compute capability 9.0"
    assert report.flags["trt_engine_cache_enable"] == "True"
    assert [(one.path, one.size_bytes) for one in report.files] == [("a.engine", 5)]
    folder = repository.folder_of(manifest) / "compiled" / name
    written = (folder / "report.json").stat().st_mtime_ns
    (folder / "b.engine").write_bytes(b"second")
    instance.close()
    assert [one.path for one in repository.variants.reports(manifest)[name].files] == ["a.engine", "b.engine"]
    OnnxRuntime(tmp_path).load(path, same(), "tensorrt:0", 1).close()
    assert (folder / "report.json").stat().st_mtime_ns > written
    assert sorted(one.name for one in folder.iterdir()) == ["a.engine", "b.engine", "report.json"]
    (folder / "report.json").write_text("{")
    OnnxRuntime(tmp_path).load(path, same(), "tensorrt:0", 1).close()
    assert repository.variants.reports(manifest)[name].files, "a damaged report is replaced"


def test_both_packages_of_onnx_runtime_are_refused_at_the_start(tmp_path: Path) -> None:
    """They install the same files: what runs then is decided by the order of their installation."""
    for package in ("onnxruntime", "onnxruntime-gpu"):
        folder = tmp_path / f"{package.replace('-', '_')}-1.31.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.31.0\n")
    for module in ("millstream.workers", "millstream.gateway"):
        done = subprocess.run(
            [sys.executable, "-P", "-m", module],
            env=child_environment({"PYTHONPATH": str(tmp_path), "MILLSTREAM_HOME": str(tmp_path / "home")}),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1, done.stderr
        assert "onnxruntime and onnxruntime-gpu are both installed" in done.stderr
        assert "pip uninstall onnxruntime onnxruntime-gpu" in done.stderr
