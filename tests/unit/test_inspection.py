"""Inspection of model files: errors that say what to do, signatures, and proven batching.

In this process, for speed; tests/integration/test_model_check.py runs the same in the checker's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from millstream.services.errors import Code, Failure
from millstream.services.ingest.inspection import inspect
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.model.manifest import Batching
from tests.kit import models

pytestmark = pytest.mark.plugins

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
Dims = Sequence[int | str | None] | None


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "staging" / "source"
    folder.mkdir(parents=True)
    return folder


def checked(source: Path, batching: bool | None = None, name: str = "model.onnx") -> CheckedModel:
    task = CheckTask(folder=source.parent, batching=batching, unpacked_bytes_max=0, memory_bytes_max=0, cpu_s_max=0)
    return inspect(task, source / name)


def refused(source: Path, batching: bool | None = None) -> str:
    with pytest.raises(Failure) as caught:
        checked(source, batching)
    assert caught.value.code is Code.INVALID
    assert "\n" not in caught.value.message
    assert str(source.parent) not in caught.value.message
    return caught.value.message


def shapes(specs: Sequence[object]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(spec.name, spec.datatype, spec.shape) for spec in specs]  # type: ignore[attr-defined]


def value(name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    opsets: Sequence[tuple[str, int]] = (("", 17),),
    ir_version: int = 8,
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(weights))
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def save(source: Path, model: onnx.ModelProto) -> None:
    (source / "model.onnx").write_bytes(model.SerializeToString())


def relu(dims: Dims = ("N", 4), **kwargs: object) -> onnx.ModelProto:
    return build([helper.make_node("Relu", ["x"], ["y"])], [value("x", dims)], [value("y", dims)], **kwargs)  # type: ignore[arg-type]


def integers(name: str, values: Sequence[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def run(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))


def assert_serves_rows_of_original(source: Path, found: CheckedModel, rows: int = 5) -> None:
    """Assert that the served file gives the same outputs for several rows as the source does for each row alone."""
    spec = found.signature.inputs[0]
    x = np.random.default_rng(7).standard_normal((rows, *spec.shape[1:])).astype(np.float32)
    together = run(source.parent / found.served, {spec.name: x})[0]
    alone = [run(source / "model.onnx", {spec.name: x[row : row + 1]})[0] for row in range(rows)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-4, atol=1e-6)


# What is read.


def test_a_model_with_symbolic_rows_is_served_unchanged_and_batches(source: Path) -> None:
    models.mlp(source / "model.onnx")
    found = checked(source)
    assert found.signature.batching
    assert shapes(found.signature.inputs) == [("input", "FP32", (-1, 64))]
    assert shapes(found.signature.outputs) == [("output", "FP32", (-1, 10))]
    assert (found.served, found.files, found.notes) == ("source/model.onnx", ("source/model.onnx",), ())
    assert (found.opset, found.ir_version) == (models.OPSET, models.IR_VERSION)
    assert not (source.parent / "compiled").exists()


@pytest.mark.parametrize("datatype", sorted(models.ELEMENT_TYPE))
def test_every_datatype_is_read_and_batches(source: Path, datatype: str) -> None:
    models.identity(source / "model.onnx", datatype)
    found = checked(source)
    assert shapes(found.signature.inputs) == [("x", datatype, (-1, 2))]
    assert shapes(found.signature.outputs) == [("y", datatype, (-1, 2))]
    assert found.signature.batching
    assert found.notes == ()


@pytest.mark.parametrize(("kind", "words"), [(TensorProto.FLOAT8E5M2, "FLOAT8E5M2"), (TensorProto.INT4, "INT4")])
def test_element_types_that_v2_lacks_are_rejected(source: Path, kind: int, words: str) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    save(source, build([node], [value("x", ["N"], kind)], [value("y", ["N"], kind)], opsets=[("", 21)], ir_version=10))
    assert words in refused(source)


def test_initializers_listed_as_inputs_are_not_inputs(source: Path) -> None:
    add = helper.make_node("Add", ["x", "w"], ["y"])
    weight = numpy_helper.from_array(np.ones(4, np.float32), "w")
    save(source, build([add], [value("x", ["N", 4]), value("w", [4])], [value("y", ["N", 4])], [weight], [("", 9)], 3))
    assert [spec.name for spec in checked(source).signature.inputs] == ["x"]


def test_output_dimensions_that_a_run_contradicts_become_variable(source: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"]), helper.make_node("Identity", ["x"], ["z"])]
    outputs = [value("y", ["N"]), value("z", ["N", 7])]
    save(source, build(nodes, [value("x", ["N", "K"]), value("s", [2], TensorProto.INT64)], outputs))
    found = checked(source, batching=False)
    assert shapes(found.signature.outputs) == [("y", "FP32", (-1, -1)), ("z", "FP32", (-1, -1))]


def test_inputs_without_a_shape_are_refused(source: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    save(source, build([node], [value("x", None)], [value("y", None)]))
    assert "'x' has no shape: run onnx.shape_inference" in refused(source)


@pytest.mark.parametrize("kind", ["sequence", "optional"])
def test_inputs_that_are_not_tensors_are_rejected(source: Path, kind: str) -> None:
    inner = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    make = {"sequence": helper.make_sequence_type_proto, "optional": helper.make_optional_type_proto}[kind]
    given = helper.make_value_info("x", make(inner))
    operator = {"sequence": "SequenceLength", "optional": "OptionalHasElement"}[kind]
    result = value("y", [], TensorProto.INT64 if kind == "sequence" else TensorProto.BOOL)
    save(source, build([helper.make_node(operator, ["x"], ["y"])], [given], [result]))
    assert f"input 'x' is of type {kind}: only tensors can be served" in refused(source)


# What is refused.


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"not a model at all", b"\x08\x08", b"PK", b"\x80\x04pickle" * 50, bytes(range(256)) * 9]
)
def test_a_file_that_is_not_a_model_is_rejected(source: Path, content: bytes) -> None:
    (source / "model.onnx").write_bytes(content)
    assert "not an ONNX model" in refused(source)


def test_a_truncated_model_is_rejected(source: Path) -> None:
    whole = models.mlp(source / "model.onnx").read_bytes()
    for share in (0.001, 0.1, 0.5, 0.9, 0.99):
        (source / "model.onnx").write_bytes(whole[: int(len(whole) * share)])
        assert refused(source)


def test_the_error_for_a_new_opset_names_the_newest_supported(source: Path) -> None:
    save(source, relu(opsets=[("", 99)]))
    message = refused(source)
    assert "opset 99 of ai.onnx is newer" in message
    newest = int(message.split("opset_version=")[1].split()[0])
    save(source, relu(opsets=[("", newest)]))
    assert checked(source).opset == newest


def test_an_opset_of_another_domain_that_is_too_new_is_refused(source: Path) -> None:
    save(source, relu(opsets=[("", 17), ("ai.onnx.ml", 99)]))
    assert "opset 99 of ai.onnx.ml is newer" in refused(source)


def test_the_error_for_a_new_ir_version_names_the_newest_supported(source: Path) -> None:
    save(source, relu(ir_version=99))
    message = refused(source)
    assert "IR version 99 is newer" in message
    newest = int(message.split("model.ir_version = ")[1].split()[0])
    save(source, relu(ir_version=newest))
    assert checked(source).ir_version == newest


def test_custom_operators_are_refused_by_name(source: Path) -> None:
    node = helper.make_node("Mill", ["x"], ["y"], domain="com.example")
    model = build([node], [value("x", ["N"])], [value("y", ["N"])], opsets=[("", 17), ("com.example", 1)])
    save(source, model)
    assert "operator Mill of domain 'com.example'" in refused(source)


def test_custom_operators_in_a_branch_are_refused_too(source: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Mill", ["x"], ["b"], domain="com.example")], "b", [], [value("b", [])]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    opsets = [("", 17), ("com.example", 1)]
    save(source, build([node], [value("x", []), value("c", [], TensorProto.BOOL)], [value("y", [])], opsets=opsets))
    assert "operator Mill of domain 'com.example'" in refused(source)


def test_functions_of_the_model_are_not_custom_operators(source: Path) -> None:
    opset = helper.make_opsetid("", 17)
    function = helper.make_function(
        "com.example", "Mill", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [opset]
    )
    node = helper.make_node("Mill", ["x"], ["y"], domain="com.example")
    model = build([node], [value("x", ["N", 2])], [value("y", ["N", 2])], opsets=[("", 17), ("com.example", 1)])
    model.functions.append(function)
    save(source, model)
    assert checked(source).signature.batching


def test_unknown_and_wrongly_used_operators_are_refused(source: Path) -> None:
    save(source, build([helper.make_node("Mill", ["x"], ["y"])], [value("x", ["N"])], [value("y", ["N"])]))
    assert "operator Mill is unknown" in refused(source)
    save(source, build([helper.make_node("Add", ["x"], ["y"])], [value("x", ["N"])], [value("y", ["N"])]))
    assert "breaks the rules of ONNX" in refused(source)


def test_types_that_do_not_fit_are_refused_by_onnx_runtime(source: Path) -> None:
    node = helper.make_node("Add", ["x", "i"], ["y"])
    save(source, build([node], [value("x", ["N"]), value("i", ["N"], TensorProto.INT64)], [value("y", ["N"])]))
    assert "ONNX Runtime cannot load the model" in refused(source)


# Weights in other files.


def with_external_weights(source: Path, location: str = "weights.bin", rows: int | str = "N") -> onnx.ModelProto:
    weight = numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(4, 4), "w")
    (source / "weights.bin").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", "0"), ("length", "64")):
        weight.external_data.add(key=key, value=text)
    multiply = helper.make_node("MatMul", ["x", "w"], ["y"])
    return build([multiply], [value("x", [rows, 4])], [value("y", [rows, 4])], [weight])


def test_external_weights_in_the_archive_are_read(source: Path) -> None:
    save(source, with_external_weights(source))
    found = checked(source)
    assert found.files == ("source/model.onnx", "source/weights.bin")
    assert found.signature.batching


def test_a_rewritten_model_keeps_its_external_weights(source: Path) -> None:
    save(source, with_external_weights(source, rows=1))
    found = checked(source)
    assert found.files == ("compiled/onnx/model.onnx", "compiled/onnx/weights.bin")
    assert found.signature.batching
    assert_serves_rows_of_original(source, found)


def test_the_error_names_missing_external_weights(source: Path) -> None:
    save(source, with_external_weights(source))
    (source / "weights.bin").unlink()
    message = refused(source)
    assert "weights.bin" in message
    assert "upload a zip or tar" in message
    (source / "other.bin").touch()
    assert "'weights.bin', which is missing beside the model" in refused(source)


@pytest.mark.parametrize("location", ["/etc/hostname", "../../secret.bin", "a/../../secret.bin", "*/_ORT_MEM_ADDR_/*"])
def test_external_weights_outside_the_archive_are_refused(source: Path, location: str) -> None:
    (source.parent.parent / "secret.bin").write_bytes(b"\0" * 64)
    save(source, with_external_weights(source, location))
    (source / "*" / "_ORT_MEM_ADDR_").mkdir(parents=True)
    (source / "*" / "_ORT_MEM_ADDR_" / "*").write_bytes(b"\0" * 64)
    assert "not a path below the model's folder" in refused(source)


def test_external_weights_cut_short_are_refused(source: Path) -> None:
    save(source, with_external_weights(source))
    (source / "weights.bin").write_bytes(b"\0" * 63)
    assert "'weights.bin' has 63 bytes, but the model reads up to byte 64" in refused(source)


# Batching.


@pytest.mark.parametrize(
    "make", [lambda path: models.convolution(path, 1), lambda path: models.mlp(path, 1)], ids=["convolution", "mlp"]
)
def test_a_batch_fixed_at_one_is_made_variable(source: Path, make: Callable[[Path], Path]) -> None:
    original = make(source / "model.onnx").read_bytes()
    found = checked(source)
    assert found.signature.batching
    assert found.served == "compiled/onnx/model.onnx"
    assert "made variable" in found.notes[0]
    assert (source / "model.onnx").read_bytes() == original
    assert found.signature.inputs[0].shape[0] == found.signature.outputs[0].shape[0] == -1
    assert_serves_rows_of_original(source, found)


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v2"])
def test_real_architectures_of_batch_one_are_made_variable(source: Path, name: str) -> None:
    (source / "model.onnx").write_bytes((LIGHT / f"light_{name}.onnx").read_bytes())
    found = checked(source)
    assert found.signature.batching
    assert_serves_rows_of_original(source, found, rows=2)


def test_squeezenet_with_real_weights_is_made_variable(source: Path) -> None:
    models.squeezenet(source / "model.onnx", 1)
    found = checked(source)
    assert shapes(found.signature.inputs) == [("data_0", "FP32", (-1, 3, 224, 224))]
    assert shapes(found.signature.outputs) == [("scores", "FP32", (-1, 1000))]
    assert found.signature.batching
    assert_serves_rows_of_original(source, found, rows=2)


@pytest.mark.parametrize("target", [[1, -1], [1, 12], [1, 3, 4]])
@pytest.mark.parametrize("constant", [True, False])
def test_constant_reshapes_are_rewritten_with_the_rows(source: Path, target: list[int], constant: bool) -> None:
    shape = integers("shape", target)
    maker = [helper.make_node("Constant", [], ["shape"], value=shape)] if constant else []
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    dims = [dim if dim != -1 else 12 for dim in target]
    save(source, build([*maker, reshape], [value("x", [1, 4, 3])], [value("y", dims)], [] if constant else [shape]))
    found = checked(source)
    assert shapes(found.signature.outputs) == [("y", "FP32", (-1, *dims[1:]))]
    assert_serves_rows_of_original(source, found)


def test_a_reshape_of_transposed_rows_is_rewritten(source: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]),
        helper.make_node("ReduceSum", ["turned", "axis"], ["sums"], keepdims=0),
        helper.make_node("Reshape", ["sums", "pairs"], ["y"]),
    ]
    weights = [integers("axis", [0]), integers("pairs", [1, 3, 2])]
    save(source, build(nodes, [value("x", [1, 4, 6])], [value("y", [1, 3, 2])], weights))
    assert_serves_rows_of_original(source, checked(source))


def test_a_reshape_that_infers_its_rows_is_rewritten(source: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["line"]),
        helper.make_node("Reshape", ["line", "back"], ["y"]),
    ]
    weights = [integers("flat", [-1]), integers("back", [1, 6])]
    save(source, build(nodes, [value("x", [1, 2, 3])], [value("y", [1, 6])], weights))
    assert_serves_rows_of_original(source, checked(source))


def test_reshapes_of_weights_stay_as_they_are(source: Path) -> None:
    nodes = [helper.make_node("Reshape", ["w", "shape"], ["bias"]), helper.make_node("Add", ["x", "bias"], ["y"])]
    weights = [numpy_helper.from_array(np.arange(4, dtype=np.float32), "w"), integers("shape", [1, 4])]
    save(source, build(nodes, [value("x", [1, 4])], [value("y", [1, 4])], weights))
    found = checked(source)
    assert found.signature.batching
    assert_serves_rows_of_original(source, found)


def test_outputs_declared_with_one_row_do_not_prevent_batching(source: Path) -> None:
    save(source, build([helper.make_node("Relu", ["x"], ["y"])], [value("x", ["N", 4])], [value("y", [1, 4])]))
    found = checked(source)
    assert found.signature.batching
    assert shapes(found.signature.outputs) == [("y", "FP32", (-1, 4))]


def test_a_model_that_mixes_rows_does_not_batch_and_says_why(source: Path) -> None:
    models.row_mixing(source / "model.onnx")
    found = checked(source)
    assert not found.signature.batching
    assert found.served == "source/model.onnx"
    assert shapes(found.signature.inputs) == [("x", "FP32", (1, 4))]
    assert "Div (which computes 'y')" in found.notes[0] or "ReduceSum (which computes 'total')" in found.notes[0]
    assert not (source.parent / "compiled").exists()


def softmax_over_rows() -> onnx.ModelProto:
    return build([helper.make_node("Softmax", ["x"], ["y"], axis=0)], [value("x", ["N", 4])], [value("y", ["N", 4])])


def noise() -> onnx.ModelProto:
    nodes = [helper.make_node("RandomNormalLike", ["x"], ["n"]), helper.make_node("Add", ["x", "n"], ["y"])]
    return build(nodes, [value("x", ["N", 4])], [value("y", ["N", 4])])


def numbered_rows() -> onnx.ModelProto:
    node = helper.make_node("CumSum", ["x", "axis"], ["y"])
    axis = numpy_helper.from_array(np.array(0, np.int64), "axis")
    return build([node], [value("x", ["N", 4])], [value("y", ["N", 4])], [axis])


def all_nan() -> onnx.ModelProto:
    nodes = [helper.make_node("Sub", ["x", "x"], ["zero"]), helper.make_node("Div", ["zero", "zero"], ["y"])]
    return build(nodes, [value("x", ["N", 4])], [value("y", ["N", 4])])


def filtered() -> onnx.ModelProto:
    nodes = [
        helper.make_node("ReduceSum", ["x", "axis"], ["sums"], keepdims=0),
        helper.make_node("Greater", ["sums", "zero"], ["chosen"]),
        helper.make_node("Compress", ["x", "chosen"], ["y"], axis=0),
    ]
    weights = [integers("axis", [1]), numpy_helper.from_array(np.array(0, np.float32), "zero")]
    return build(nodes, [value("x", ["N", 4])], [value("y", ["N", 4])], weights)


def two_symbols() -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["a"], ["x"]), helper.make_node("Relu", ["b"], ["y"])]
    return build(nodes, [value("a", ["N", 2]), value("b", ["M", 2])], [value("x", ["N", 2]), value("y", ["M", 2])])


def scalar_output() -> onnx.ModelProto:
    return build([helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], [value("x", ["N", 4])], [value("y", [])])


def square() -> onnx.ModelProto:
    return build([helper.make_node("Relu", ["x"], ["y"])], [value("x", ["N", "N"])], [value("y", ["N", "N"])])


ALONE = {
    "Softmax (which computes 'y')": softmax_over_rows,
    "RandomNormalLike (which computes 'n')": noise,
    "CumSum (which computes 'y')": numbered_rows,
    "Compress (which computes 'y')": filtered,
    "different numbers of rows (M of 'b', N of 'a')": two_symbols,
    "output 'y' is a scalar": scalar_output,
    "is also another dimension of input 'x'": square,
    "fixed first dimension of 3": lambda: relu([3, 4]),
}


@pytest.mark.parametrize(("words", "make"), ALONE.items(), ids=list(ALONE))
def test_dependent_rows_do_not_share_a_run(source: Path, words: str, make: Callable[[], onnx.ModelProto]) -> None:
    save(source, make())
    found = checked(source)
    assert not found.signature.batching
    assert words in found.notes[0]
    assert found.notes[0].startswith("Requests run one at a time: ")
    assert found.batching.decided == "off"
    assert found.batching.reason in found.notes[0]


@pytest.mark.parametrize("make", [softmax_over_rows, noise, numbered_rows, filtered])
def test_trials_reject_requested_batching_with_wrong_results(source: Path, make: Callable[[], onnx.ModelProto]) -> None:
    save(source, make())
    message = refused(source, batching=True)
    assert message.startswith("batching is not possible: output 'y'")


def test_a_proof_suffices_where_trials_show_nothing(source: Path) -> None:
    save(source, all_nan())
    found = checked(source)
    assert found.batching == Batching(decided="proven")
    assert "No trial input changes 'y'" in found.notes[0]


def test_models_with_scalars_or_without_inputs_do_not_batch(source: Path) -> None:
    save(source, relu([]))
    assert shapes(checked(source).signature.inputs) == [("x", "FP32", ())]
    constant = helper.make_node("Constant", [], ["y"], value_floats=[1.0, 2.0])
    save(source, build([constant], [], [value("y", [2])]))
    found = checked(source)
    assert (found.signature.inputs, found.signature.batching) == ((), False)


def test_batching_can_be_switched_off(source: Path) -> None:
    models.mlp(source / "model.onnx", 1)
    found = checked(source, batching=False)
    assert not found.signature.batching
    assert (found.served, found.notes) == ("source/model.onnx", ())
    assert found.signature.inputs[0].shape == (1, 64)


def test_requested_batching_that_is_impossible_is_rejected(source: Path) -> None:
    models.row_mixing(source / "model.onnx")
    message = refused(source, batching=True)
    assert message.startswith("batching is not possible: ")
    save(source, two_symbols())
    assert checked(source, batching=True).signature.batching


def test_variable_sizes_are_tried_until_one_runs(source: Path) -> None:
    models.windowed(source / "model.onnx", window=32)
    found = checked(source)
    assert found.signature.batching
    assert found.notes == ()
    assert shapes(found.signature.inputs) == [("x", "FP32", (-1, -1))]


def test_generated_indices_are_small_enough_for_short_tables(source: Path) -> None:
    models.lookup(source / "model.onnx")
    assert checked(source).signature.batching


def test_a_model_without_a_working_trial_input_batches_only_on_request(source: Path) -> None:
    models.windowed(source / "model.onnx", window=1013)
    found = checked(source)
    assert not found.signature.batching
    assert "Requests run one at a time: no trial input would run" in found.notes[0]
    asked = checked(source, batching=True)
    assert asked.signature.batching
    assert asked.batching.decided == "requested"
    assert "because the configuration says so; no trial input would run" in asked.notes[0]


def test_all_inputs_and_outputs_are_compared(source: Path) -> None:
    models.add_sub(source / "model.onnx")
    assert checked(source).signature.batching
    nodes = [
        helper.make_node("Relu", ["x"], ["fine"]),
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["mixed"]),
    ]
    outputs = [value("fine", ["N", 4]), value("mixed", ["N", 4])]
    save(source, build(nodes, [value("x", ["N", 4])], outputs))
    assert "ReduceMean (which computes 'mean')" in checked(source).notes[0]
    assert "output 'mixed'" in refused(source, batching=True)


def test_a_model_of_scikit_learn_is_served(source: Path) -> None:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression

    x = np.random.default_rng(5).standard_normal((60, 3)).astype(np.float32)
    fitted = LogisticRegression().fit(x, (x[:, 0] > 0).astype(int))
    save(source, to_onnx(fitted, x[:1], target_opset=17, options={"zipmap": False}))
    found = checked(source)
    assert shapes(found.signature.inputs) == [("X", "FP32", (-1, 3))]
    assert shapes(found.signature.outputs) == [("label", "INT64", (-1,)), ("probabilities", "FP32", (-1, 2))]
    assert found.signature.batching


# Inputs with a default.


def test_an_input_with_a_stored_value_of_variable_size_is_optional(source: Path) -> None:
    models.scaled(source / "model.onnx")
    found = checked(source)
    assert found.signature.batching
    assert shapes(found.signature.inputs) == [("scale", "FP32", (-1, 1)), ("x", "FP32", (-1, 4))]
    assert [spec.optional for spec in found.signature.inputs] == [True, False]


def with_default(dims: Dims, stored: np.ndarray, ir_version: int = 8, *, weights: bool = False) -> onnx.ModelProto:
    """Return y = x + b, where b has a stored value; `weights` adds an initializer that is not listed as an input."""
    others = [numpy_helper.from_array(np.ones(1, np.float32), "one")] if weights else []
    nodes = [
        helper.make_node("Add", ["x", "b"], ["s"]),
        helper.make_node("Add", ["s", "one" if weights else "b"], ["y"]),
    ]
    inputs, outputs = [value("x", ["N", 4]), value("b", dims)], [value("y", ["N", 4])]
    return build(nodes, inputs, outputs, [numpy_helper.from_array(stored, "b"), *others], ir_version=ir_version)


def test_weights_listed_by_an_exporter_are_not_inputs(source: Path) -> None:
    stored = np.ones(4, np.float32)
    for ir_version in (3, 8):
        save(source, with_default([4], stored, ir_version))
        for batching in (None, False):
            assert [spec.name for spec in checked(source, batching).signature.inputs] == ["x"]


def test_a_default_of_fixed_size_is_optional_without_batching(source: Path) -> None:
    save(source, with_default([4], np.ones(4, np.float32), weights=True))
    assert [(spec.name, spec.optional) for spec in checked(source, False).signature.inputs] == [
        ("x", False),
        ("b", True),
    ]
    assert [spec.name for spec in checked(source).signature.inputs] == ["x"]  # all versions would share it


def test_a_default_that_mixes_rows_is_not_an_input(source: Path) -> None:
    nodes = [helper.make_node("ReduceSum", ["b"], ["t"], keepdims=1), helper.make_node("Add", ["x", "t"], ["y"])]
    stored = [numpy_helper.from_array(np.zeros((1, 1), np.float32), "b")]
    save(source, build(nodes, [value("x", ["N", 4]), value("b", ["M", 1])], [value("y", ["N", 4])], stored))
    found = checked(source)
    assert found.signature.batching
    assert [spec.name for spec in found.signature.inputs] == ["x"]
