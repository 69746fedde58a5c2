"""A classifier as skl2onnx writes it by default is pushed and answers labels, probabilities and names of classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import skl2onnx
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from tests.kit.stack import Stack, assert_nothing_left, running_stack

X = np.random.default_rng(1).standard_normal((80, 4)).astype(np.float32)
NAMES = np.array(["cat", "dog", "eel"])[np.digitize(X[:, 0], [-0.5, 0.5])]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running
        assert_nothing_left(running)


def test_a_classifier_with_zip_map_answers_tensors_and_the_names_of_its_classes(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, NAMES)
    path.write_bytes(skl2onnx.to_onnx(fitted, X[:1], target_opset={"": 18, "ai.onnx.ml": 3}).SerializeToString())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    labels, maps = onnxruntime.InferenceSession(path, options).run(None, {"X": X[:5]})
    stack.push("zipped", path)
    with InferenceServerClient(stack.url.removeprefix("http://")) as client:
        given = InferInput("X", [5, 4], "FP32")
        given.set_data_from_numpy(X[:5])
        reply: Any = client.infer("zipped", [given])
        assert [label.decode() for label in reply.as_numpy("output_label")] == labels.tolist()
        expected = [list(row.values()) for row in maps]
        np.testing.assert_allclose(reply.as_numpy("output_probability"), expected, rtol=1e-5)
        top = InferRequestedOutput("output_probability", class_count=1)
        best: Any = client.infer("zipped", [given], outputs=[top]).as_numpy("output_probability")
    assert [element.decode().split(":")[2] for element in best.ravel()] == labels.tolist()


def test_a_request_whose_sizes_of_one_name_differ_fails_alone(stack: Stack, tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[N, L, 4] x, float[N, L] m) => (float[N, L, 4] y)
        <int64[1] all = {-1}, int64[1] four = {4}> {
        l = Shape<start = 1>(m)  s = Concat<axis = 0>(all, l, four)  a = Reshape(x, s)  y = Relu(a) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    stack.push("lengths", tmp_path / "model.onnx")
    x, mask = np.ones((2, 6, 4), np.float32), np.ones((2, 6), np.float32)

    def ask(mask: np.ndarray[Any, Any]) -> Any:
        tensors = [
            {"name": name, "datatype": "FP32", "shape": array.shape, "data": array.ravel().tolist()}
            for name, array in (("x", x), ("m", mask))
        ]
        return stack.http.post("/v2/models/lengths/infer", json={"inputs": tensors})

    assert ask(mask).json()["outputs"][0]["shape"] == [2, 6, 4]
    refused = ask(mask[:, :3])
    assert refused.status_code == 500
    assert "'m' must have the sizes of 'x' in dimensions of the same name" in refused.json()["error"]
    assert ask(mask).status_code == 200
