"""Quantization of models that are not easy: outliers, no batching, weights in another file, old operator sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from millstream.plugins.compile.calibration import cosine
from millstream.plugins.compile.candidate import Compiled, Subject
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.compile.targets import get_target
from millstream.plugins.compile.targets.onnxruntime import COSINE_MIN, NOTHING_QUANTIZED, outputs
from millstream.services.model.signature import Signature, TensorSpec
from tests.kit.compile_targets import compiled, task

FEATURES = 32
OUTLIER = 3000.0
ROWS = ("N", FEATURES)


def save(path: Path, nodes: list[Any], weights: dict[str, Any], opset: int = 17, **options: Any) -> Path:
    """Write a model: "x" -> "y", FP32 [N, FEATURES]."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(ROWS)) for name in ("x", "y")]
    stored = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "model", value[:1], value[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path, **options)
    return path


def layers(path: Path, number: int = 8, outlier: float = 1.0, **options: Any) -> Path:
    """Write a chain of products with Relu; before the last, one feature is `outlier` times as large as the others."""
    random, nodes, weights, last = np.random.default_rng(0), [], {}, "x"
    for layer in range(number):
        name = "y" if layer == number - 1 else f"h{layer}"
        weights[f"w{layer}"] = random.standard_normal((FEATURES, FEATURES)) * (2 / FEATURES) ** 0.5
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [name], name=f"matmul{layer}"))
        last = name
        if layer < number - 2:
            nodes.append(helper.make_node("Relu", [last], [f"r{layer}"], name=f"relu{layer}"))
            last = f"r{layer}"
    weights[f"w{number - 2}"][:, 0] *= outlier
    weights[f"w{number - 1}"][0] /= outlier
    return save(path, nodes, weights, **options)


def subject(path: Path, *, batching: bool = True, rows: int = -1) -> Subject:
    signature = Signature(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(rows, FEATURES)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=(rows, FEATURES)),),
        batching=batching,
    )
    return Subject(path=path, source_format="onnx", signature=signature)


def quantized(of: Subject, folder: Path) -> tuple[Compiled, float]:
    """Compile with the first candidate. Returns the form, and the cosine of its outputs on other inputs."""
    arrays: dict[str, Any] = {"input/x": np.random.default_rng(1).standard_normal((48, FEATURES)).astype(np.float32)}
    given = folder / "samples.npz"
    np.savez(given, **arrays)
    candidate = get_target("onnxruntime-int8-static").candidates(of)[0]
    made = compiled(compile_candidate(task(of, candidate, folder / "out", given)))
    feeds = [{"x": np.random.default_rng(2).standard_normal((48, FEATURES)).astype(np.float32)}]
    (one,), (other,) = outputs(of.path, feeds), outputs(folder / "out" / made.files[0], feeds)
    return made, cosine(one, other)


def test_the_nodes_that_hurt_are_left_in_floating_point(tmp_path: Path) -> None:
    made, found = quantized(subject(layers(tmp_path / "model.onnx", outlier=OUTLIER)), tmp_path)
    assert "nodes are left in floating point" in made.notes[0]
    assert found >= COSINE_MIN
    graph = onnx.load(str(tmp_path / "out" / made.files[0])).graph
    assert any(node.op_type == "QuantizeLinear" for node in graph.node)


def test_a_version_that_does_not_batch_is_calibrated_with_whole_calls(tmp_path: Path) -> None:
    path = layers(tmp_path / "model.onnx", outlier=OUTLIER)
    model = onnx.load(str(path))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 48
    onnx.save(model, path)
    _, found = quantized(subject(path, batching=False, rows=48), tmp_path)
    assert found >= COSINE_MIN


@pytest.mark.parametrize("options", [{"opset": 11}, {"save_as_external_data": True, "size_threshold": 0}])
def test_old_operator_sets_and_weights_in_another_file_are_quantized(tmp_path: Path, options: Any) -> None:
    of = subject(layers(tmp_path / "model.onnx", number=3, **options))
    _, found = quantized(of, tmp_path)
    assert found > 0.99


def test_rows_of_a_quantized_version_stay_independent(tmp_path: Path) -> None:
    made, _ = quantized(subject(layers(tmp_path / "model.onnx", number=3)), tmp_path)
    assert made.rows_independent


@pytest.mark.parametrize("bias", [np.full((1, FEATURES), 0.5), np.full((1, 1), 0.5)])
def test_biases_of_two_dimensions_are_quantized(tmp_path: Path, bias: Any) -> None:
    """As scikit-learn's networks have them, once ONNX Runtime has made Gemm of a product and a sum."""
    weights = {"w": np.random.default_rng(0).standard_normal((FEATURES, FEATURES)) / FEATURES**0.5, "b": bias}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="product")]
    nodes.append(helper.make_node("Add", ["h", "b"], ["y"], name="sum"))
    _, found = quantized(subject(save(tmp_path / "model.onnx", nodes, weights)), tmp_path)
    assert found >= COSINE_MIN


def test_constants_that_say_shapes_are_no_obstacle(tmp_path: Path) -> None:
    path = layers(tmp_path / "model.onnx", number=3)
    model = onnx.load(str(path))
    model.graph.initializer.append(numpy_helper.from_array(np.array([2], np.int64), "axes"))
    model.graph.node[0].input[0] = "flat"
    model.graph.node.insert(0, helper.make_node("Squeeze", ["deep", "axes"], ["flat"], name="squeeze"))
    model.graph.node.insert(0, helper.make_node("Unsqueeze", ["x", "axes"], ["deep"], name="unsqueeze"))
    onnx.save(model, path)
    _, found = quantized(subject(path), tmp_path)
    assert found > 0.99


def test_a_model_without_products_or_sums_is_refused_by_every_way_to_choose_ranges(tmp_path: Path) -> None:
    path = save(tmp_path / "model.onnx", [helper.make_node("Sin", ["x"], ["y"], name="sine")], {})
    given = tmp_path / "samples.npz"
    arrays: dict[str, Any] = {"input/x": np.ones((8, FEATURES), np.float32)}
    np.savez(given, **arrays)
    for at, candidate in enumerate(get_target("onnxruntime-int8-static").candidates(subject(path))):
        outcome = compile_candidate(task(subject(path), candidate, tmp_path / f"out-{at}", given))
        assert outcome.error == NOTHING_QUANTIZED
