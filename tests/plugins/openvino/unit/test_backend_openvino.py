"""What the OpenVINO backend adds to the contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from millstream.plugins.engines.openvino.worker import GROUP_MAX, SHAPES_MAX, OpenVino, _properties
from millstream.services.errors import Code, Failure
from millstream.workers.backends import get_backend
from tests.contract.backend_cases import OPENVINO, same, signature
from tests.kit import models


def test_numbers_are_close_to_those_of_onnx_runtime(tmp_path: Path) -> None:
    path = models.squeezenet(tmp_path / "squeezenet.onnx")
    given = np.random.default_rng(0).standard_normal((3, 3, 224, 224)).astype(np.float32)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = session.run(None, {"data_0": given})[0]
    output = signature([("data_0", "FP32", (-1, 3, 224, 224))], [(session.get_outputs()[0].name, "FP32", (-1, 1000))])
    (taken,) = get_backend("openvino").load(path, output, "cpu", 1).run({"data_0": given})
    np.testing.assert_allclose(taken.reshape(3, -1), expected.reshape(3, -1), atol=1e-5)


def test_it_computes_with_as_many_threads_as_asked_for_and_in_single_precision(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "mlp.onnx")
    shapes = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
    for threads in (1, 2):
        instance = OpenVino().open(path, shapes, threads, {}, None)
        assert instance._model.get_property("INFERENCE_NUM_THREADS") == threads
        assert instance._model.get_property("INFERENCE_PRECISION_HINT").to_dtype() == np.float32


def test_the_size_of_a_group_of_a_dynamic_quantization_is_set_and_checked(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "mlp.onnx")
    shapes = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
    instance = OpenVino().open(path, shapes, 1, {"dynamic_group": 128}, None)
    assert instance._model.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 128
    for group in (0, -1, GROUP_MAX + 1):
        with pytest.raises(Failure, match="'dynamic_group' of the backend openvino is a number from 1 to"):
            OpenVino().load(path, shapes, "cpu", 1, options={"dynamic_group": group})


def test_memory_for_shapes_is_bounded(tmp_path: Path) -> None:
    """By default an MLP of 20 KB takes 250 MB after a thousand batch sizes, and goes on."""
    path = models.mlp(tmp_path / "mlp.onnx")
    instance = OpenVino().load(path, signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))]), "cpu", 1)
    options = _properties(1, {})
    assert options["CPU_RUNTIME_CACHE_CAPACITY"] == SHAPES_MAX
    for rows in (1, 100, 1):  # the library accepts the option, which it does not document
        assert instance.run({"input": np.zeros((rows, 64), np.float32)})[0].shape == (rows, 10)


def test_numbers_that_it_would_cut_off_are_refused(tmp_path: Path) -> None:
    instance = OPENVINO.load_identity(tmp_path, "INT64")
    largest = np.array([[2**31 - 1, -(2**31)]])
    assert instance.run({"x": largest})[0].tolist() == largest.tolist()
    for number in (2**31, -(2**31) - 1, 2**40):
        with pytest.raises(Failure, match="32 bits, and input 'x'") as caught:
            instance.run({"x": np.array([[1, number]])})
        assert caught.value.code is Code.MODEL


def test_a_model_without_the_tensors_of_its_signature_is_refused(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "identity.onnx")
    with pytest.raises(Failure, match=r"identity.onnx has no tensor 'z'"):
        get_backend("openvino").load(path, signature([("x", "FP32", (-1, 2))], [("z", "FP32", (-1, 2))]), "cpu", 1)


def test_a_model_of_another_datatype_than_its_signature_is_refused_when_it_runs(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "identity.onnx", "INT32")
    instance = get_backend("openvino").load(path, same("FP32"), "cpu", 1)
    with pytest.raises(Failure, match="FP32") as caught:
        instance.run({"x": np.ones((1, 2), np.float32)})
    assert caught.value.code is Code.MODEL


def test_a_file_of_another_format_is_not_read(tmp_path: Path) -> None:
    """OpenVINO itself would read an IR, a TensorFlow graph or a PyTorch file, whatever its name says."""
    import openvino

    source = models.mlp(tmp_path / "mlp.onnx")
    openvino.save_model(openvino.Core().read_model(source), tmp_path / "model.xml")
    renamed = tmp_path / "model.onnx"
    renamed.write_bytes((tmp_path / "model.xml").read_bytes())
    shapes = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
    with pytest.raises(Failure) as caught:
        get_backend("openvino").load(renamed, shapes, "cpu", 1)
    assert caught.value.code is Code.MODEL


def test_nothing_is_sent_over_the_network(tmp_path: Path) -> None:
    """A converter that comes with OpenVINO reports its runs to its makers; a backend that only loads must not."""
    path = models.identity(tmp_path / "identity.onnx")
    done = subprocess.run(
        [sys.executable, "-P", "-c", SILENT, path, same().model_dump_json()], check=True, capture_output=True, text=True
    )
    assert done.stdout == "ran\n", done.stderr


SILENT = """
import socket, sys
def refuse(*_):
    print("connects")
    raise OSError
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from pathlib import Path
import numpy as np
from millstream.services.model.signature import Signature
from millstream.workers.backends import get_backend
instance = get_backend("openvino").load(Path(sys.argv[1]), Signature.model_validate_json(sys.argv[2]), "cpu", 1)
instance.run({"x": np.ones((1, 2), np.float32)})
instance.close()
print("ran")
"""
