"""The target and the backend "tvm": compiled in the sandbox, loaded only by races, raced only if named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from millstream.plugins.compile.candidate import Compiled, CompileOutcome, CompileTask, Subject
from millstream.plugins.compile.form_runner import Measuring, Opening, compile_candidate
from millstream.plugins.compile.race.samples import write_samples
from millstream.plugins.compile.targets import get_target
from millstream.plugins.compile.worker import driver
from millstream.plugins.engines.tvm.target import DOCUMENT, LIBRARY
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Instance, Terminated
from tests.kit import models
from tests.kit.races import MLP, signature

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]  # a compilation takes minutes on a busy machine

PAIR = signature(
    [("ids", "INT64", (-1, -1)), ("mask", "FP64", (-1, -1))], [("sum", "FP64", (-1, -1)), ("ids2", "INT64", (-1, -1))]
)


def pair(path: Path) -> Path:
    """Write a model: ids, mask of unnamed sizes -> sum = ids + mask, ids2 = ids + ids."""
    nodes = [
        helper.make_node("Cast", ["ids"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Add", ["wide", "mask"], ["sum"]),
        helper.make_node("Add", ["ids", "ids"], ["ids2"]),
    ]
    inputs = [("ids", TensorProto.INT64), ("mask", TensorProto.DOUBLE)]
    outputs = [("ids2", TensorProto.INT64), ("sum", TensorProto.DOUBLE)]  # another order than the signature's
    graph = helper.make_graph(
        nodes,
        "pair",
        [helper.make_tensor_value_info(name, kind, [None, 3]) for name, kind in inputs],
        [helper.make_tensor_value_info(name, kind, [None, 3]) for name, kind in outputs],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def compiled(folder: Path, path: Path, of: Signature) -> CompileOutcome:
    subject = Subject(path=path, source_format="onnx", signature=of)
    candidate = get_target("tvm").candidates(subject)[0]
    folder.mkdir()
    task = CompileTask(subject=subject, candidate=candidate, folder=folder, seconds_max=800, low_priority=False)
    return compile_candidate(task)


def load(folder: Path, of: Signature, made: Compiled) -> Instance:
    return get_backend(made.backend).load(folder / made.files[0], of, "cpu", 1, None, made.options)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Compiled]:
    folder = tmp_path_factory.mktemp("mlp")
    outcome = compiled(folder / "out", models.mlp(folder / "mlp.onnx"), MLP)
    assert outcome.compiled is not None, outcome.error + outcome.stderr
    return folder / "out", outcome.compiled


def test_inputs_without_named_sizes_and_outputs_in_another_order(tmp_path: Path) -> None:
    outcome = compiled(tmp_path / "out", pair(tmp_path / "pair.onnx"), PAIR)
    assert outcome.compiled is not None, outcome.error + outcome.stderr
    instance = load(tmp_path / "out", PAIR, outcome.compiled)
    for rows in (1, 5):
        ids, mask = np.arange(3 * rows).reshape(rows, 3), np.full((rows, 3), 0.5)
        total, double = instance.run({"ids": ids, "mask": mask})
        assert total.tolist() == (ids + 0.5).tolist()
        assert double.tolist() == (2 * ids).tolist()
    instance.close()


def test_an_instance_refuses_wrong_inputs_and_goes_on(mlp: tuple[Path, Compiled]) -> None:
    instance = load(mlp[0], MLP, mlp[1])
    x = np.ones((2, 64), np.float32)
    wanted = np.array(instance.run({"input": x})[0])
    for wrong in ({}, {"input": x[:, :3]}, {"input": x.astype(np.float64)}, {"other": x}):
        with pytest.raises(Failure) as caught:
            instance.run(wrong)
        assert caught.value.code is Code.MODEL
    instance.terminate()
    with pytest.raises(Terminated):
        instance.run({"input": x})
    instance.rebuild()
    np.testing.assert_array_equal(instance.run({"input": x})[0], wanted)
    instance.close()
    instance.close()
    with pytest.raises(Failure, match="unloaded"):
        instance.run({"input": x})


def test_only_what_a_compilation_wrote_is_loaded(mlp: tuple[Path, Compiled], tmp_path: Path) -> None:
    backend, folder = get_backend("tvm"), mlp[0]
    with pytest.raises(Failure, match="only what a race compiled") as caught:
        backend.load(folder / DOCUMENT, MLP, "cpu", 1)
    assert caught.value.code is Code.INVALID
    with pytest.raises(Failure, match="cuda:0"):
        backend.load(folder / DOCUMENT, MLP, "cuda:0", 1, None, mlp[1].options)
    good = json.loads((folder / DOCUMENT).read_text())
    for document, reason in (
        ("no document", "no document of a compiled model"),
        (json.dumps(good | {"library": "../model.so"}), "not beside it"),
        (json.dumps(good | {"inputs": ["other"]}), "other inputs or outputs"),
        (json.dumps(good), LIBRARY),  # there is no library
    ):
        (tmp_path / DOCUMENT).write_text(document)
        with pytest.raises(Failure, match=reason) as caught:
            backend.load(tmp_path / DOCUMENT, MLP, "cpu", 1, None, mlp[1].options)
        assert caught.value.code is Code.MODEL
    (tmp_path / LIBRARY).write_bytes(b"no library")
    with pytest.raises(Failure) as caught:
        backend.load(tmp_path / DOCUMENT, MLP, "cpu", 1, None, mlp[1].options)
    assert caught.value.code is Code.MODEL


def test_what_tvm_cannot_compile_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    node = helper.make_node("Det", ["x"], ["y"])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("x", [3, 3]), ("y", []))]
    graph = helper.make_graph([node], "det", ends[:1], ends[1:])
    path = tmp_path / "det.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    outcome = compiled(tmp_path / "out", path, signature([("x", "FP32", (3, 3))], [("y", "FP32", ())], batching=False))
    assert outcome.compiled is None
    assert outcome.error.startswith("TVM cannot compile the model:")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_process_of_a_race_measures_it(mlp: tuple[Path, Compiled], tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.npz"
    write_samples(inputs, {"input": np.ones((4, 64), np.float32)})
    path, options = mlp[0] / mlp[1].files[0], mlp[1].options
    opening = Opening(
        backend="tvm", path=path, signature=MLP, device="cpu", threads=1, inputs=inputs, options=options,
        memory_bytes=1 << 30, folder=tmp_path,
    )  # fmt: skip
    process = Measuring(opening, 280.0)
    try:
        assert min(process.times(4, 0.01, 60.0)) > 0
    finally:
        process.close()


def test_a_race_tries_it_only_if_it_is_named(tmp_path: Path) -> None:
    assert get_target("tvm").experimental
    subject = Subject(path=models.mlp(tmp_path / "mlp.onnx"), source_format="onnx", signature=MLP)
    racing, others = driver._candidates(subject, [get_target("tvm")], ("tvm",), ())
    assert [one.flags for one in racing] == [{"schedules": True}, {"schedules": False}]
    assert others == []
