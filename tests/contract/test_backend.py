"""What every backend must do, run against each of them; then what is particular to ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array, Instance
from millstream.workers.backends.onnxruntime import OnnxRuntime
from millstream.workers.profiler import measure
from tests.kit import models

Spec = tuple[str, str, tuple[int, ...]]


def signature(inputs: Sequence[Spec], outputs: Sequence[Spec], batching: bool = True) -> Signature:
    def specs(rows: Sequence[Spec]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in rows)

    return Signature(inputs=specs(inputs), outputs=specs(outputs), batching=batching)


def same(datatype: str = "FP32", shape: tuple[int, ...] = (-1, 2)) -> Signature:
    return signature([("x", datatype, shape)], [("y", datatype, shape)])


def some(datatype: str, rows: int) -> Array:
    """Elements that tell themselves apart, in the form that a backend takes."""
    if datatype == "BYTES":
        texts = [f"row {i} é\0{i}".encode() for i in range(2 * rows)]
        return np.array(texts, dtype=object).reshape(rows, 2)
    return (np.arange(2 * rows) % 7).reshape(rows, 2).astype(NUMPY[datatype])


@pytest.fixture(params=["onnxruntime", "simulated"])
def backend_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load_identity(backend_name: str, folder: Path, datatype: str = "FP32") -> Instance:
    """A model whose output is its input."""
    if backend_name == "simulated":
        path = folder / "model.json"
        path.write_text("{}")
    else:
        path = models.identity(folder / "identity.onnx", datatype)
    return get_backend(backend_name).load(path, same(datatype), "cpu", 1)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("datatype", [*NUMPY, "BYTES"])
def test_every_datatype_comes_back_as_it_went_in(backend_name: str, tmp_path: Path, datatype: str, rows: int) -> None:
    instance = load_identity(backend_name, tmp_path, datatype)
    given = some(datatype, rows)
    (taken,) = instance.run({"x": given})
    assert taken.dtype == given.dtype
    assert taken.shape == given.shape
    assert taken.tolist() == given.tolist()


@pytest.mark.parametrize("datatype", ["FP32", "BF16"])
def test_arrays_that_are_read_only_or_not_in_order_are_taken(backend_name: str, tmp_path: Path, datatype: str) -> None:
    instance = load_identity(backend_name, tmp_path, datatype)
    given = some(datatype, 6)[::2, ::-1]
    given.flags.writeable = False
    (taken,) = instance.run({"x": given})
    assert taken.tolist() == given.tolist()


def test_results_do_not_share_memory_with_inputs(backend_name: str, tmp_path: Path) -> None:
    instance = load_identity(backend_name, tmp_path)
    given = some("FP32", 2)
    (taken,) = instance.run({"x": given})
    assert not np.shares_memory(given, taken)


def test_a_missing_input_is_a_failure_of_the_model(backend_name: str, tmp_path: Path) -> None:
    instance = load_identity(backend_name, tmp_path)
    with pytest.raises(Failure, match="missing") as caught:
        instance.run({})
    assert caught.value.code is Code.MODEL


@pytest.mark.parametrize("kept_elsewhere", [False, True])
def test_a_file_that_was_deleted_meanwhile_is_a_failure_of_the_model(
    backend_name: str, tmp_path: Path, kept_elsewhere: bool
) -> None:
    home = tmp_path / "home" if kept_elsewhere else None
    with pytest.raises(Failure, match="gone") as caught:
        get_backend(backend_name, home).load(tmp_path / "gone", same(), "cpu", 1)
    assert caught.value.code is Code.MODEL


def test_a_file_that_is_no_model_is_refused(backend_name: str, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.write_bytes(b"\x08\x08 not a model")
    with pytest.raises(Failure, match="broken") as caught:
        get_backend(backend_name).load(path, same(), "cpu", 1)
    assert caught.value.code is Code.MODEL
    assert str(tmp_path) not in caught.value.message


def test_a_file_that_is_not_there_is_refused(backend_name: str, tmp_path: Path) -> None:
    with pytest.raises(Failure) as caught:
        get_backend(backend_name).load(tmp_path / "none", same(), "cpu", 1)
    assert caught.value.code is Code.MODEL


def test_size_is_known_and_closing_twice_is_harmless(backend_name: str, tmp_path: Path) -> None:
    instance = load_identity(backend_name, tmp_path)
    assert instance.size_bytes >= 0
    instance.close()
    instance.close()


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(Failure, match="unknown backend 'caffe'; known: onnxruntime, simulated"):
        get_backend("caffe")


def test_importing_the_backends_imports_no_library() -> None:
    modules = "sys, millstream.workers.backends, millstream.workers.profiler"
    code = f"import {modules}; print({{'onnxruntime', 'onnx'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


class TestOnnxRuntime:
    @pytest.fixture
    def mlp(self, tmp_path: Path) -> Iterator[Instance]:
        shapes = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
        instance = get_backend("onnxruntime").load(models.mlp(tmp_path / "mlp.onnx"), shapes, "cpu", 1)
        yield instance
        instance.close()

    def test_numbers_are_onnx_runtimes_own(self, mlp: Instance, tmp_path: Path) -> None:
        given = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)
        session = onnxruntime.InferenceSession(tmp_path / "mlp.onnx", providers=["CPUExecutionProvider"])
        (taken,) = mlp.run({"input": given})
        np.testing.assert_array_equal(taken, session.run(None, {"input": given})[0])

    def test_outputs_come_in_the_signatures_order(self, tmp_path: Path) -> None:
        takes: list[Spec] = [("a", "FP32", (-1, 4)), ("b", "FP32", (-1, 4))]
        gives: list[Spec] = [("difference", "FP32", (-1, 4)), ("sum", "FP32", (-1, 4))]
        path = models.add_sub(tmp_path / "add_sub.onnx")
        instance = get_backend("onnxruntime").load(path, signature(takes, gives), "cpu", 1)
        five, two = np.full((3, 4), 5, np.float32), np.full((3, 4), 2, np.float32)
        difference, total = instance.run({"b": two, "a": five})
        assert (difference[0, 0], total[0, 0]) == (3, 7)

    def test_a_failing_run_says_what_onnx_runtime_said_and_the_next_one_works(self, tmp_path: Path) -> None:
        path = models.lookup(tmp_path / "lookup.onnx")
        shapes = signature([("index", "INT64", (-1, 1))], [("y", "FP32", (-1, 1))])
        instance = get_backend("onnxruntime").load(path, shapes, "cpu", 1)
        with pytest.raises(Failure, match="indices element out of data bounds, idx=99") as caught:
            instance.run({"index": np.array([[1], [99]])})
        assert caught.value.code is Code.MODEL
        assert "\n" not in caught.value.message
        assert "[ONNXRuntimeError]" not in caught.value.message
        assert instance.run({"index": np.array([[3]])})[0].tolist() == [[30.0]]

    def test_text_that_is_not_utf8_is_the_callers_mistake(self, tmp_path: Path) -> None:
        instance = load_identity("onnxruntime", tmp_path, "BYTES")
        with pytest.raises(Failure, match="input 'x': element 3 is not UTF-8") as caught:
            instance.run({"x": np.array([[b"a", b"b"], [b"c", b"\xff"]], dtype=object)})
        assert caught.value.code is Code.INVALID

    def test_bf16_out_of_a_model_that_takes_text_is_refused_at_load(self, tmp_path: Path) -> None:
        path = models.identity(tmp_path / "identity.onnx", "BYTES")
        unlike = signature([("x", "BYTES", (-1, 2))], [("y", "BF16", (-1, 2))])
        with pytest.raises(Failure, match="cannot return BF16"):
            get_backend("onnxruntime").load(path, unlike, "cpu", 1)

    @pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
    @pytest.mark.parametrize("datatype", ["FP32", "BF16", "BYTES"])
    def test_shapes_without_rows(self, tmp_path: Path, datatype: str, shape: tuple[int, ...]) -> None:
        path = models.identity(tmp_path / "identity.onnx", datatype, shape)
        spec = ("x", datatype, shape)
        shapes = signature([spec], [("y", *spec[1:])], batching=False)
        instance = get_backend("onnxruntime").load(path, shapes, "cpu", 1)
        given = np.full(shape, b"a", dtype=object) if datatype == "BYTES" else np.ones(shape, NUMPY[datatype])
        (taken,) = instance.run({"x": given})
        assert (taken.shape, taken.tolist()) == (given.shape, given.tolist())

    @pytest.mark.parametrize("device", ["cuda:99", "tensorrt:99", "tpu", "cpu:1", "cuda:x"])
    def test_a_device_that_cannot_be_used_is_refused(self, tmp_path: Path, device: str) -> None:
        path = models.identity(tmp_path / "identity.onnx")
        with pytest.raises(Failure, match=device) as caught:
            get_backend("onnxruntime").load(path, same(), device, 1)
        assert caught.value.code is Code.UNAVAILABLE

    @pytest.mark.filterwarnings("ignore:Specified provider")
    def test_a_session_that_quietly_went_to_the_cpu_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # onnxruntime-gpu lists CUDA on every machine, and its sessions then run on the CPU where there is none.
        listed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
        path = models.identity(tmp_path / "identity.onnx")
        with pytest.raises(Failure, match="'cuda:99' cannot be used") as caught:
            get_backend("onnxruntime").load(path, same(), "cuda:99", 1)
        assert caught.value.code is Code.UNAVAILABLE

    def test_warm_up_finds_the_length_that_a_model_takes(self, tmp_path: Path) -> None:
        path = models.windowed(tmp_path / "windowed.onnx", window=16)
        shapes = signature([("x", "FP32", (-1, -1))], [("means", "FP32", (-1, -1))])
        instance = get_backend("onnxruntime").load(path, shapes, "cpu", 1)
        assert list(measure(instance, shapes, 6, 5.0).seconds) == [1, 2, 4, 6]

    def test_loading_and_closing_gives_memory_back(self, tmp_path: Path) -> None:
        path = models.squeezenet(tmp_path / "squeezenet.onnx")
        shapes = signature([("data_0", "FP32", (-1, 3, 224, 224))], [("scores", "FP32", (-1, 1000))])
        given = {"data_0": np.zeros((4, 3, 224, 224), np.float32)}

        def cycle() -> int:
            instance = get_backend("onnxruntime").load(path, shapes, "cpu", 1)
            instance.run(given)
            instance.close()
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        cycle()
        after_one = cycle()
        assert [cycle() for _ in range(5)][-1] < after_one + 10 * 2**20

    def test_a_closed_instance_refuses_to_run(self, mlp: Instance) -> None:
        mlp.close()
        with pytest.raises(Failure, match="unloaded"):
            mlp.run({"input": np.zeros((1, 64), np.float32)})

    def test_threads_are_those_asked_for(self, tmp_path: Path) -> None:
        """In a process of its own: threads of others come and go here."""
        path = models.identity(tmp_path / "identity.onnx")
        counted = subprocess.run(
            [sys.executable, "-P", "-c", THREADS, path, same().model_dump_json()],
            capture_output=True,
            text=True,
            check=True,
        )
        assert counted.stdout.split() == ["0", "2"], counted.stderr


THREADS = """
import sys
from pathlib import Path
from millstream.services.model.signature import Signature
from millstream.workers.backends import get_backend

path, signature = Path(sys.argv[1]), Signature.model_validate_json(sys.argv[2])
backend = get_backend("onnxruntime")
kept = [backend.load(path, signature, "cpu", 1)]
counts = []
for threads in (1, 3):
    before = len(list(Path("/proc/self/task").iterdir()))
    kept.append(backend.load(path, signature, "cpu", threads))
    counts.append(len(list(Path("/proc/self/task").iterdir())) - before)
print(*counts)
"""


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
