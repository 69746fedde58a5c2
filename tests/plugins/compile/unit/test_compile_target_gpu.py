"""What the targets for GPUs write and say, without one: files, options and refusals. tests/gpu needs the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from millstream.plugins.compile.candidate import Subject
from millstream.plugins.compile.targets import get_target
from millstream.services.errors import Code, Failure
from millstream.workers.backends import get_backend
from tests.kit.compile_targets import check_outputs, images, run, samples, subject

GPU = ["tensorrt", "tensorrt-fp16", "tensorrt-int8", "cuda", "cuda-fp16"]


def on(device: str, folder: Path) -> Subject:
    return subject(folder, device)


def test_candidates_are_those_that_differ_from_how_the_version_is_served(tmp_path: Path) -> None:
    found = {
        device: [name for name in GPU if get_target(name).candidates(on(device, tmp_path))]
        for device in ("cpu", "cuda:0", "tensorrt:1")
    }
    assert found == {
        "cpu": [],
        "cuda:0": ["tensorrt", "tensorrt-fp16", "tensorrt-int8", "cuda-fp16"],
        "tensorrt:1": ["tensorrt-fp16", "tensorrt-int8", "cuda", "cuda-fp16"],
    }


@pytest.mark.parametrize("name", GPU)
def test_on_a_cpu_the_reason_names_the_hardware(name: str) -> None:
    missing = get_target(name).available("cpu")
    assert missing is not None
    assert missing.why == f"{name} is used on NVIDIA GPUs, not on cpu"


@pytest.mark.parametrize("name", GPU)
def test_a_gpu_that_the_driver_does_not_know_is_named(name: str) -> None:
    missing = get_target(name).available("cuda:77")
    assert missing is not None
    assert missing.why == "the NVIDIA driver knows no cuda:77"


def test_fp16_is_in_the_file_and_not_in_the_signature(tmp_path: Path) -> None:
    of, target = on("cuda:0", tmp_path), get_target("cuda-fp16")
    made = target.compile(of, target.candidates(of)[0], tmp_path, None)
    model = onnx.load(str(tmp_path / made.files[0]))
    assert {tensor.data_type for tensor in model.graph.initializer if tensor.dims} == {TensorProto.FLOAT16}
    outer = [*model.graph.input, *model.graph.output]
    assert {value.type.tensor_type.elem_type for value in outer} == {TensorProto.FLOAT}
    session = onnxruntime.InferenceSession(tmp_path / made.files[0], providers=["CPUExecutionProvider"])
    found = session.run(None, {"image": images(4)})[0]
    check_outputs(target, run(of.model_copy(update={"device": "cpu"}), None, tmp_path, images(4)), found)
    assert made.options == {"provider": "cuda"}


def test_int8_is_symmetric_as_tensorrt_needs_it(tmp_path: Path) -> None:
    of, target = on("cuda:0", tmp_path), get_target("tensorrt-int8")
    made = target.compile(of, target.candidates(of)[0], tmp_path, samples(tmp_path / "samples.npz"))
    model = onnx.load(str(tmp_path / made.files[0]))
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    quantizers = [node for node in model.graph.node if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]
    assert quantizers
    points = [values[node.input[2]] for node in quantizers if len(node.input) > 2]
    assert {point.dtype for point in points} == {np.dtype(np.int8)}
    assert not any(point.any() for point in points)
    session = onnxruntime.InferenceSession(tmp_path / made.files[0], providers=["CPUExecutionProvider"])
    found = session.run(None, {"image": images(4)})[0]
    check_outputs(target, run(of.model_copy(update={"device": "cpu"}), None, tmp_path, images(4)), found)


@pytest.mark.parametrize(("device", "provider"), [("cpu", "cuda"), ("cuda:0", "rocm")])
def test_a_provider_is_an_option_of_gpus_alone(tmp_path: Path, device: str, provider: str) -> None:
    of = subject(tmp_path)
    with pytest.raises(Failure, match="the option 'provider' is one of cuda, tensorrt, on a GPU") as caught:
        get_backend("onnxruntime").load(of.path, of.signature, device, 1, None, {"provider": provider})
    assert caught.value.code is Code.INVALID
