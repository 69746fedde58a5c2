"""What exporters write by default is mended: same answers, in a form that v2 carries and a proof can read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from millstream.services.errors import Failure
from millstream.services.ingest.inspection import inspect
from millstream.services.ingest.report import CheckedModel, CheckTask

pytestmark = pytest.mark.plugins

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])
ROWS = np.array([[1, 2, 3], [-4, 0.5, 6]], np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path


def checked(folder: Path, model: onnx.ModelProto, *, in_place: bool = False) -> CheckedModel:
    path = folder / "source" / "model.onnx"
    path.write_bytes(model.SerializeToString())
    served = "source/model.onnx" if in_place else None
    task = CheckTask(folder=folder, batching=None, unpacked_bytes_max=0, memory_bytes_max=0, cpu_s_max=0, served=served)
    return inspect(task, path)


def answers(path: Path, **inputs: np.ndarray) -> list[object]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return list(onnxruntime.InferenceSession(path, options).run(None, inputs or {"x": ROWS}))


def model_of(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[onnx.ValueInfoProto] = (Y,),
    weights: Sequence[onnx.TensorProto] = (),
    inputs: Sequence[onnx.ValueInfoProto] = (X,),
    ir_version: int = 8,
    name: str = "graph",
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    graph.name = name
    opsets = [helper.make_opsetid("", 8 if ir_version == 3 else 17), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def classifier(names: Sequence[str] | Sequence[int], opsets: Sequence[str] = ("", "ai.onnx.ml")) -> onnx.ModelProto:
    """Return a linear classifier that ends in ZipMap, as skl2onnx and CatBoost write it."""
    kind = TensorProto.STRING if isinstance(names[0], str) else TensorProto.INT64
    listed: dict[str, Any] = {"classlabels_strings" if isinstance(names[0], str) else "classlabels_int64s": names}
    linear: dict[str, Any] = {"classlabels_strings" if isinstance(names[0], str) else "classlabels_ints": names}
    weights: dict[str, Any] = {"coefficients": [1.0, 0, 0, 0, 1, 0, 0, 0, 1], "intercepts": [0.0, 0.5, 0.0]}
    nodes = [
        helper.make_node("LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", **linear, **weights),
        helper.make_node("ZipMap", ["scores"], ["probabilities"], domain="ai.onnx.ml", **listed),
    ]
    maps = helper.make_map_type_proto(kind, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    outputs = [
        helper.make_tensor_value_info("label", kind, ["N"]),
        helper.make_value_info("probabilities", helper.make_sequence_type_proto(maps)),
    ]
    model = model_of(nodes, outputs)
    kept = [entry for entry in model.opset_import if entry.domain in opsets]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model


@pytest.mark.parametrize("opsets", [("", "ai.onnx.ml"), ("ai.onnx.ml",)])
def test_zip_map_becomes_a_tensor_with_the_names_of_its_columns(folder: Path, opsets: Sequence[str]) -> None:
    model = classifier(["cat", "dog", "eel"], opsets)
    found = checked(folder, model)
    _, maps = answers(folder / "source" / "model.onnx")
    _, scores = answers(folder / found.served)
    assert isinstance(maps, list)
    assert [list(row.values()) for row in maps] == np.asarray(scores).tolist()
    assert [(spec.name, spec.datatype, spec.shape) for spec in found.signature.outputs] == [
        ("label", "BYTES", (-1,)),
        ("probabilities", "FP32", (-1, 3)),
    ]
    assert found.batching.decided == "proven"
    assert found.notes == (
        "Output 'probabilities' is a tensor instead of a list of maps (ZipMap); its columns are: cat, dog, eel.",
    )
    assert (folder / found.labels["probabilities"]).read_text().split("\n") == ["cat", "dog", "eel"]
    assert found.sources == ("source/model.onnx",)


@pytest.mark.parametrize(("names", "kept"), [([0, 1, 2], False), ([3, 7, 9], True), (["a\nb", "c", "d"], False)])
def test_names_that_say_nothing_or_have_two_lines_are_no_labels(
    folder: Path, names: Sequence[str] | Sequence[int], kept: bool
) -> None:
    assert bool(checked(folder, classifier(names)).labels) == kept


def test_odd_names_and_many_outputs_leave_a_bounded_report(folder: Path) -> None:
    model = classifier(["new\nline", "\x1b[31m", "x" * 5000])
    zipped, port = model.graph.node[1], model.graph.output[1]
    for at in range(40):
        name = f"{at}" + "y" * 500
        model.graph.node.append(helper.make_node("ZipMap", ["scores"], [name], domain="ai.onnx.ml"))
        model.graph.node[-1].attribute.extend(zipped.attribute)
        model.graph.output.append(helper.make_value_info(name, port.type))
    notes = checked(folder, model).notes
    assert 0 < len(notes) <= 10
    assert all(note.isprintable() and len(note) < 1000 for note in notes)


def test_an_empty_list_is_refused(folder: Path) -> None:
    empty = helper.make_value_info("y", helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, None)))
    with pytest.raises(Failure, match="'y' is of type sequence"):
        checked(folder, model_of([helper.make_node("SequenceEmpty", [], ["y"])], [empty]))


@pytest.mark.parametrize("batching", [True, False])
def test_an_input_with_a_default_is_optional_or_the_note_says_why_not(folder: Path, batching: bool) -> None:
    stored = [numpy_helper.from_array(np.full((3,), at, np.float32), name) for at, name in enumerate("ws", 2)]
    scale = helper.make_tensor_value_info("s", TensorProto.FLOAT, [3])
    nodes = [helper.make_node("Mul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "s"], ["y"])]
    model = model_of(nodes, weights=stored, inputs=[X, scale])
    if not batching:
        nodes.append(helper.make_node("ReduceMax", ["y"], ["z"], axes=[0]))
        model = model_of(nodes, [helper.make_tensor_value_info("z", 1, [1, 3])], stored, [X, scale])
    found = checked(folder, model)
    assert [spec.name for spec in found.signature.inputs] == (["x"] if batching else ["x", "s"])
    assert any("cannot set inputs with a default ('s')" in note for note in found.notes) == batching


def test_a_list_of_tensors_becomes_an_output_for_each(folder: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("ReduceMax", ["x"], ["b"], axes=[1]),
        helper.make_node("SequenceConstruct", ["a", "b"], ["y"]),
    ]
    element = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    found = checked(folder, model_of(nodes, [helper.make_value_info("y", helper.make_sequence_type_proto(element))]))
    assert [(spec.name, spec.shape) for spec in found.signature.outputs] == [("y_0", (-1, -1)), ("y_1", (-1, -1))]
    assert found.batching.decided == "proven"
    (parts,) = answers(folder / "source" / "model.onnx")
    for one, other in zip(parts, answers(folder / found.served), strict=True):  # type: ignore[call-overload]
        assert np.array_equal(one, other)


def test_initializers_need_not_be_inputs_before_ir_4(folder: Path) -> None:
    weights = [numpy_helper.from_array(np.full((3,), at, np.float32), name) for at, name in enumerate("vw", 2)]
    listed = helper.make_tensor_value_info("v", TensorProto.FLOAT, [3])
    nodes = [helper.make_node("Mul", ["x", "v"], ["h"]), helper.make_node("Add", ["h", "w"], ["y"])]
    found = checked(folder, model_of(nodes, weights=weights, inputs=[X, listed], ir_version=3))
    assert [spec.name for spec in found.signature.inputs] == ["x"]
    assert found.batching.decided == "proven"
    assert np.array_equal(answers(folder / found.served)[0], ROWS * 2 + 3)  # type: ignore[arg-type]


def test_nodes_may_be_in_any_order_and_read_from_graphs_inside(folder: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("Add", ["h", "h"], ["twice"])], "then", [], [helper.make_tensor_value_info("twice", 1, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["h"], ["less"])], "else", [], [helper.make_tensor_value_info("less", 1, None)]
    )
    condition = numpy_helper.from_array(np.array(True), "yes")
    nodes = [
        helper.make_node("Relu", ["i"], ["y"]),
        helper.make_node("If", ["yes"], ["i"], then_branch=inner, else_branch=other),
        helper.make_node("Abs", ["x"], ["h"]),
    ]
    found = checked(folder, model_of(nodes, weights=[condition], name=""))
    assert found.batching.decided == "proven"
    assert np.array_equal(answers(folder / found.served)[0], np.abs(ROWS) * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [None, []])
def test_outputs_without_a_shape_have_that_of_a_run(folder: Path, dims: list[str] | None) -> None:
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)
    found = checked(folder, model_of([helper.make_node("Relu", ["x"], ["y"])], [result]))
    assert found.signature.outputs[0].shape[:1] == (-1,)
    assert found.batching.decided == ("proven" if dims is None else "off")


def test_a_model_that_is_served_in_place_is_not_changed_and_not_proven_where_it_should_be(folder: Path) -> None:
    model = model_of([helper.make_node("Relu", ["h"], ["y"]), helper.make_node("Neg", ["x"], ["h"])])
    found = checked(folder, model, in_place=True)
    assert (found.served, found.batching.decided) == ("source/model.onnx", "off")
    assert "it breaks the rules of ONNX: Nodes in a graph must be topologically sorted" in found.batching.reason
    assert not (folder / "compiled").exists()


def test_variable_channels_are_those_that_a_convolution_takes(folder: Path) -> None:
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "channels", "height", "width"])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2, "height", "width"])
    weights = numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "w")
    found = checked(folder, model_of([helper.make_node("Conv", ["x", "w"], ["y"])], [result], [weights], [image]))
    assert found.signature.inputs[0].shape == (-1, 3, -1, -1)
    assert found.batching.decided == "proven"


@pytest.mark.parametrize(
    ("names", "decided"),
    [(("unk__11", "unk__12"), "proven"), (("DynamicDimension.0", "DynamicDimension.1"), "proven"), (("n", "m"), "off")],
)
def test_names_that_an_exporter_makes_up_do_not_say_that_sizes_differ(
    folder: Path, names: tuple[str, str], decided: str
) -> None:
    inputs = [helper.make_tensor_value_info(name, 1, [rows, 3]) for name, rows in zip("xy", names, strict=True)]
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, [names[0], 3])
    found = checked(folder, model_of([helper.make_node("Add", ["x", "y"], ["z"])], [result], inputs=inputs))
    assert found.batching.decided == decided


@pytest.mark.parametrize(("names", "decided"), [(("L", "L"), "proven"), (("L", "M"), "off")])
def test_sizes_that_inputs_name_alike_are_equal_or_the_request_fails(
    folder: Path, names: tuple[str, str], decided: str
) -> None:
    data = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", names[0], 4])
    mask = helper.make_tensor_value_info("m", TensorProto.FLOAT, ["N", names[1]])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "L", 4])
    stored = [numpy_helper.from_array(np.array([value]), name) for name, value in (("one", -1), ("four", 4))]
    branch = helper.make_graph(
        [helper.make_node("ReduceMax", ["m"], ["top"], axes=[1])],
        "b",
        [],
        [helper.make_tensor_value_info("top", 1, None)],
    )
    nodes = [
        helper.make_node("Shape", ["m"], ["length"], start=1),
        helper.make_node("Concat", ["one", "length", "four"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["h"]),
        helper.make_node("If", ["yes"], ["top"], then_branch=branch, else_branch=branch),
        helper.make_node("Unsqueeze", ["top", "one"], ["wide"]),
        helper.make_node("Mul", ["h", "wide"], ["y"]),
    ]
    stored.append(numpy_helper.from_array(np.array(True), "yes"))
    found = checked(folder, model_of(nodes, [result], stored, [data, mask]))
    assert found.batching.decided == decided
    fed = {"x": np.ones((2, 6, 4), np.float32), "m": np.full((2, 6), 3, np.float32)}
    original, served = folder / "source" / "model.onnx", folder / found.served
    assert np.array_equal(answers(original, **fed)[0], answers(served, **fed)[0])  # type: ignore[arg-type]
    fed["m"] = fed["m"][:, :3]
    if decided == "proven":
        assert "dimensions of the same name" in found.notes[0]
        with pytest.raises(Exception, match="Reshape"):
            answers(served, **fed)


#: ONNX Runtime has kernels from opset 7 on
OPSETS = range(7, onnx.defs.onnx_opset_version() + 1)
IR_VERSIONS = range(1, onnx.IR_VERSION + 1)


def network(opset: int, ir_version: int, listed: bool) -> onnx.ModelProto:
    """Return a small convolutional network; `listed`: with its weights among the inputs."""
    shapes = {"window": (4, 3, 3, 3), "dense": (4, 2), **dict.fromkeys(("scale", "bias", "mean", "variance"), (4,))}
    weights = [numpy_helper.from_array(np.full(shape, 0.5, np.float32), name) for name, shape in shapes.items()]
    nodes = [
        helper.make_node("Conv", ["x", "window"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "scale", "bias", "mean", "variance"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["c"], ["d"]),
        helper.make_node("Flatten", ["d"], ["e"]),
        helper.make_node("Dropout", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "dense"] if opset > 10 else ["f", "dense", "zero"], ["g"]),
        helper.make_node("Softmax", ["g"], ["y"], axis=1),
    ]
    weights += [] if opset > 10 else [numpy_helper.from_array(np.zeros(2, np.float32), "zero")]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])
    inputs = [image, *(helper.make_tensor_value_info(one.name, 1, one.dims) for one in weights if listed)]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])
    graph = helper.make_graph(nodes, "network", inputs, [result], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


@pytest.mark.parametrize("listed", [True, False])
def test_every_version_that_onnx_runtime_loads_is_taken_and_proven(folder: Path, listed: bool) -> None:
    versions = [(opset, 3) for opset in OPSETS] + [(13, version) for version in IR_VERSIONS]
    taken = 0
    for opset, ir_version in versions:
        model = network(opset, ir_version, listed)
        try:
            onnxruntime.InferenceSession(model.SerializeToString())
        except Exception:  # newer than this ONNX Runtime
            continue
        found = checked(folder, model)
        assert (opset, ir_version, found.batching.decided) == (opset, ir_version, "proven")
        assert [spec.name for spec in found.signature.inputs] == ["x"]
        shutil.rmtree(folder / "compiled", ignore_errors=True)
        taken += 1
    assert taken > len(versions) // 2
