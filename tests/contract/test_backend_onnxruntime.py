"""What the ONNX Runtime backend adds to the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import NUMPY
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Instance
from millstream.workers.backends.onnxruntime import OnnxRuntime
from millstream.workers.models.profiler import measure
from tests.contract.backend_cases import ONNXRUNTIME, Spec, same, signature
from tests.kit import models


@pytest.fixture
def mlp(tmp_path: Path) -> Iterator[Instance]:
    shapes = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
    instance = get_backend("onnxruntime").load(models.mlp(tmp_path / "mlp.onnx"), shapes, "cpu", 1)
    yield instance
    instance.close()


def test_numbers_are_onnx_runtimes_own(mlp: Instance, tmp_path: Path) -> None:
    given = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "mlp.onnx", providers=["CPUExecutionProvider"])
    (taken,) = mlp.run({"input": given})
    np.testing.assert_array_equal(taken, session.run(None, {"input": given})[0])


def test_outputs_come_in_the_signatures_order(tmp_path: Path) -> None:
    takes: list[Spec] = [("a", "FP32", (-1, 4)), ("b", "FP32", (-1, 4))]
    gives: list[Spec] = [("difference", "FP32", (-1, 4)), ("sum", "FP32", (-1, 4))]
    path = models.add_sub(tmp_path / "add_sub.onnx")
    instance = get_backend("onnxruntime").load(path, signature(takes, gives), "cpu", 1)
    five, two = np.full((3, 4), 5, np.float32), np.full((3, 4), 2, np.float32)
    difference, total = instance.run({"b": two, "a": five})
    assert (difference[0, 0], total[0, 0]) == (3, 7)


def test_a_failing_run_says_what_onnx_runtime_said_and_the_next_one_works(tmp_path: Path) -> None:
    """An operator that refuses its operands is the caller's mistake, unlike one that fails."""
    shapes = signature([("index", "INT64", (-1, 1))], [("y", "FP32", (-1, 1))])
    for build, code, why in (
        (models.lookup, Code.INVALID, "indices element out of data bounds, idx=99"),
        (models.failing, Code.MODEL, "Integer division by zero"),
    ):
        instance = get_backend("onnxruntime").load(build(tmp_path / "m.onnx"), shapes, "cpu", 1)
        with pytest.raises(Failure, match=why) as caught:
            instance.run({"index": np.array([[1], [99]])})
        assert caught.value.code is code
        assert "\n" not in caught.value.message
        assert "[ONNXRuntimeError]" not in caught.value.message
        assert instance.run({"index": np.array([[3]])})[0].tolist() == [[30.0]]


def test_text_that_is_not_utf8_is_the_callers_mistake(tmp_path: Path) -> None:
    instance = ONNXRUNTIME.load_identity(tmp_path, "BYTES")
    with pytest.raises(Failure, match="input 'x': element 3 is not UTF-8") as caught:
        instance.run({"x": np.array([[b"a", b"b"], [b"c", b"\xff"]], dtype=object)})
    assert caught.value.code is Code.INVALID


def test_bf16_out_of_a_model_that_takes_text_is_refused_at_load(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "identity.onnx", "BYTES")
    unlike = signature([("x", "BYTES", (-1, 2))], [("y", "BF16", (-1, 2))])
    with pytest.raises(Failure, match="cannot return BF16"):
        get_backend("onnxruntime").load(path, unlike, "cpu", 1)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
@pytest.mark.parametrize("datatype", ["FP32", "BF16", "BYTES"])
def test_shapes_without_rows(tmp_path: Path, datatype: str, shape: tuple[int, ...]) -> None:
    path = models.identity(tmp_path / "identity.onnx", datatype, shape)
    spec = ("x", datatype, shape)
    shapes = signature([spec], [("y", *spec[1:])], batching=False)
    instance = get_backend("onnxruntime").load(path, shapes, "cpu", 1)
    given = np.full(shape, b"a", dtype=object) if datatype == "BYTES" else np.ones(shape, NUMPY[datatype])
    (taken,) = instance.run({"x": given})
    assert (taken.shape, taken.tolist()) == (given.shape, given.tolist())


@pytest.mark.parametrize("device", ["cuda:99", "tensorrt:99", "tpu", "cpu:1", "cuda:x"])
def test_a_device_that_cannot_be_used_is_refused(tmp_path: Path, device: str) -> None:
    path = models.identity(tmp_path / "identity.onnx")
    with pytest.raises(Failure, match=device) as caught:
        get_backend("onnxruntime").load(path, same(), device, 1)
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_session_that_quietly_went_to_the_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # onnxruntime-gpu lists CUDA on every machine, and its sessions then run on the CPU where there is none.
    listed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    path = models.identity(tmp_path / "identity.onnx")
    with pytest.raises(Failure, match="'cuda:99' cannot be used") as caught:
        get_backend("onnxruntime").load(path, same(), "cuda:99", 1)
    assert caught.value.code is Code.UNAVAILABLE


def test_warm_up_finds_the_length_that_a_model_takes(tmp_path: Path) -> None:
    path = models.windowed(tmp_path / "windowed.onnx", window=16)
    shapes = signature([("x", "FP32", (-1, -1))], [("means", "FP32", (-1, -1))])
    instance = get_backend("onnxruntime").load(path, shapes, "cpu", 1)
    assert list(measure(instance, shapes, 6, 5.0).seconds) == [1, 2, 4, 6]


def test_engines_of_a_model_that_is_served_in_place_are_kept_in_our_own_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    ours = home / "repository" / "models" / "m" / "1" / "source" / "model.onnx"
    other = tmp_path / "models" / "m" / "1" / "model.onnx"
    for path in (ours, other):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"1")
    backend = OnnxRuntime(home)
    assert backend._engines(ours) == ours.parent.parent / "compiled"
    kept = backend._engines(other)
    assert kept.parent == home / "engines"
    other.write_bytes(b"12")
    assert backend._engines(other) != kept
    assert OnnxRuntime()._engines(ours) == ours.parent.parent / "compiled"
