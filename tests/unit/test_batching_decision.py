"""When requests share runs: models whose rows influence each other, and what the check decides about them.

Each was once batched: random trials of three rows agreed, or no trial ran at all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from millstream.services.environment import child_environment
from millstream.services.errors import Failure
from millstream.services.ingest import batching_decision
from millstream.services.ingest.batch_trials import batch_sizes
from millstream.services.ingest.inspection import inspect
from millstream.services.ingest.proof import Proof
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.model.manifest import Batching
from tests.kit import models

pytestmark = pytest.mark.plugins

node = helper.make_node


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "staging" / "source"
    folder.mkdir(parents=True)
    return folder


def checked(source: Path, model: onnx.ModelProto, batching: bool | None = None, rows_max: int = 64) -> CheckedModel:
    (source / "model.onnx").write_bytes(model.SerializeToString())
    task = CheckTask(
        folder=source.parent,
        batching=batching,
        rows_max=rows_max,
        unpacked_bytes_max=0,
        memory_bytes_max=0,
        cpu_s_max=0,
    )
    return inspect(task, source / "model.onnx")


def weight(name: str, values: object, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def build(
    nodes: Sequence[onnx.NodeProto], weights: Sequence[onnx.TensorProto] = (), first: int | str = "N", width: int = 4
) -> onnx.ModelProto:
    """ "x" FP32 [first, width] -> "y" of the same shape."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [first, width]) for name in "xy"]
    graph = helper.make_graph(list(nodes), "graph", values[:1], values[1:], list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def detector(first: int | str = "N") -> onnx.ModelProto:
    """What is above a limit in the whole batch comes first, then padding; random numbers are not above it."""
    nodes = [
        node("Greater", ["x", "limit"], ["found"]),
        node("NonZero", ["found"], ["where"]),
        node("Transpose", ["where"], ["places"], perm=[1, 0]),
        node("GatherND", ["x", "places"], ["values"]),
        node("Shape", ["x"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["empty"]),
        node("Reshape", ["empty", "flat"], ["padding"]),
        node("Concat", ["values", "padding"], ["padded"], axis=0),
        node("ReduceProd", ["shape"], ["size"], keepdims=1),
        node("Slice", ["padded", "start", "size"], ["cut"]),
        node("Reshape", ["cut", "shape"], ["y"]),
    ]
    return build(nodes, [weight("limit", 200), weight("flat", [-1], np.int64), weight("start", [0], np.int64)], first)


def coupled_above_a_threshold() -> onnx.ModelProto:
    nodes = [
        node("ReduceMax", ["x"], ["most"], keepdims=1),
        node("Greater", ["most", "limit"], ["over"]),
        node("Neg", ["x"], ["other"]),
        node("Where", ["over", "other", "x"], ["y"]),
    ]
    return build(nodes, [weight("limit", 1e3)])


def scaled_over_the_batch() -> onnx.ModelProto:
    """By 1000 at least, so that batches of ordinary rows have one scale."""
    nodes = [
        node("Abs", ["x"], ["sizes"]),
        node("ReduceMax", ["sizes"], ["most"], axes=[0], keepdims=1),
        node("Max", ["most", "least"], ["scale"]),
        node("Div", ["x", "scale"], ["y"]),
    ]
    return build(nodes, [weight("least", 1e3)])


def dynamically_quantised() -> onnx.ModelProto:
    """Which of 64 classes is the best, as 0 and 1: what another scale changes in the scores rarely changes that."""
    width = 64
    matrix = np.random.default_rng(1).integers(-100, 100, (width, width))
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        node("MatMulInteger", ["q", "matrix", "zero"], ["sums"]),
        node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        node("Mul", ["floats", "scale"], ["scores"]),
        node("ReduceMax", ["scores"], ["best"], axes=[1], keepdims=1),
        node("Equal", ["scores", "best"], ["is_best"]),
        node("Cast", ["is_best"], ["y"], to=TensorProto.FLOAT),
    ]
    return build(nodes, [weight("matrix", matrix, np.int8)], width=width)


def leaking_a_little() -> onnx.ModelProto:
    """The mean of all rows, in a column beside a large one: next to nothing relative to the whole tensor."""
    nodes = [
        node("ReduceMean", ["x"], ["mean"], keepdims=1),
        node("Mul", ["mean", "leak"], ["leaked"]),
        node("Mul", ["x", "columns"], ["wide"]),
        node("Add", ["wide", "leaked"], ["y"]),
    ]
    return build(nodes, [weight("leak", [0, 1e-2, 0, 0]), weight("columns", [1e5, 1, 1, 1])])


def different_from_the_fourth_row_on() -> onnx.ModelProto:
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "first"], ["rows"]),
        node("Range", ["first", "rows", "step"], ["numbers"]),
        node("Greater", ["numbers", "third"], ["late"]),
        node("Cast", ["late"], ["added"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["added", "axis"], ["column"]),
        node("Add", ["x", "column"], ["y"]),
    ]
    numbers = [("first", 0), ("step", 1), ("third", 2), ("axis", [1])]
    return build(nodes, [weight(name, value, np.int64) for name, value in numbers])


def untriable_and_mixed() -> onnx.ModelProto:
    """Widths that are a multiple of 1013 alone run, so no trial does."""
    nodes = [
        node("Reshape", ["x", "windows"], ["parts"]),
        node("ReduceMean", ["parts"], ["mean"], axes=[0], keepdims=1),
        node("Sub", ["parts", "mean"], ["mixed"]),
        node("Reshape", ["mixed", "flat"], ["y"]),
    ]
    model = build(nodes, [weight("windows", [0, -1, 1013], np.int64), weight("flat", [0, -1], np.int64)])
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "L"
    return model


#: model -> the operator that ends the proof
MIXED: dict[Callable[[], onnx.ModelProto], str] = {
    detector: "NonZero",
    coupled_above_a_threshold: "ReduceMax",
    scaled_over_the_batch: "ReduceMax",
    dynamically_quantised: "DynamicQuantizeLinear",
    leaking_a_little: "ReduceMean",
    different_from_the_fourth_row_on: "the number of rows",
    untriable_and_mixed: "ReduceMean",
}


@pytest.mark.parametrize(("make", "operator"), MIXED.items(), ids=[make.__name__ for make in MIXED])
def test_rows_that_influence_each_other_are_not_batched(
    source: Path, make: Callable[[], onnx.ModelProto], operator: str
) -> None:
    found = checked(source, make())
    assert not found.signature.batching
    assert found.batching.decided == "off"
    assert "not proven" in found.batching.reason
    assert operator in found.batching.reason
    assert any(operator in note for note in found.notes)


@pytest.mark.parametrize("make", [make for make in MIXED if make is not untriable_and_mixed])
def test_trials_detect_dependent_rows(source: Path, make: Callable[[], onnx.ModelProto]) -> None:
    """Also where batching is asked for, which overrides a missing proof but no wrong answer."""
    with pytest.raises(
        Failure, match="batching is not possible: output 'y' of a row depends on the other rows of its batch"
    ):
        checked(source, make(), batching=True)


@pytest.mark.parametrize("make", [make for make in MIXED if make is not untriable_and_mixed])
def test_trials_overrule_a_wrong_proof(
    source: Path, make: Callable[[], onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_decision.ModelUnderCheck, "prove", lambda *_: Proof(True, "", ""))
    found = checked(source, make())
    assert "depends on the other rows of its batch" in found.batching.reason


def test_a_detector_of_batch_one_is_not_rewritten(source: Path) -> None:
    found = checked(source, detector(1))
    assert (found.served, found.batching.decided) == ("source/model.onnx", "off")
    assert "the fixed batch of 1 stays" in found.notes[0]
    assert "NonZero" in found.notes[0]
    with pytest.raises(Failure, match="batching is not possible"):
        checked(source, detector(1), batching=True)
    assert not (source.parent / "compiled" / "onnx").exists()


def test_batching_without_a_proof_can_be_requested(source: Path) -> None:
    """Rows are independent here, which no analysis of operators can see: the sum is multiplied with zero."""
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=1),
        node("Clip", ["sum", "zero", "zero"], ["nothing"]),
        node("Add", ["x", "nothing"], ["y"]),
    ]
    model = build(nodes, [weight("zero", 0)])
    assert checked(source, model).batching.decided == "off"
    found = checked(source, model, batching=True)
    assert found.signature.batching
    assert found.batching.decided == "requested"
    assert "ReduceSum" in found.batching.reason
    assert "Requests share runs because the configuration says so" in found.notes[0]


def test_batching_without_a_trial_can_be_requested(source: Path) -> None:
    found = checked(source, untriable_and_mixed(), batching=True)
    assert (found.signature.batching, found.batching.decided) == (True, "requested")
    assert "no trial input would run" in found.batching.reason


def test_the_manifest_says_that_batching_is_proven(source: Path) -> None:
    path = models.mlp(source / "mlp.onnx")
    model = onnx.load(str(path))
    path.unlink()
    for batching in (None, True):
        assert checked(source, model, batching).batching == Batching(decided="proven")
    off = Batching(decided="off", reason="the configuration says so")
    assert checked(source, model, batching=False).batching == off


def test_effects_beyond_the_largest_batch_do_not_count(source: Path) -> None:
    model = different_from_the_fourth_row_on()
    assert checked(source, model, batching=True, rows_max=3).signature.batching
    with pytest.raises(Failure, match="in a trial of 4 rows"):
        checked(source, model, batching=True, rows_max=4)


def test_batches_of_all_sizes_are_tried() -> None:
    assert batch_sizes(64) == [1, 2, 3, 4, 5, 8, 16, 32, 64]
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 3, 4, 5, 6]
    assert batch_sizes(100)[-2:] == [64, 100]
    assert len(batch_sizes(65536)) < 30


def test_without_a_plugin_that_proves_requests_share_no_run(tmp_path: Path) -> None:
    """The check of an upload as it is where the plug-in is turned off; a configuration may still ask for batching."""
    path = models.mlp(tmp_path / "model.onnx")
    code = (
        "import sys, pathlib\n"
        "from millstream.services.ingest.inspection import inspect\n"
        "from millstream.services.ingest.report import CheckTask\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "for wish in (None, True):\n"
        "    task = CheckTask(folder=path.parent, batching=wish, unpacked_bytes_max=1 << 30,\n"
        "        memory_bytes_max=1 << 32, cpu_s_max=60, served=path.name)\n"
        "    print(inspect(task, path).batching.decided)\n"
    )
    environment = child_environment({"MILLSTREAM_PLUGINS": "-proof"})
    command = [sys.executable, "-c", code, str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.stdout.split() == ["off", "requested"], ran.stderr
