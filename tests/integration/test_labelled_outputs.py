"""A version that answers labels: over each protocol, for requests that share a run; configurations that do not fit."""

from __future__ import annotations

import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack

LABELS = [f"class {at}" for at in range(9)] + ["größer"]
CONFIG = {"labels": {"output": "source/labels.txt"}, "classes": {"output": "output", "scores": "softmax"}}
ROWS = np.random.default_rng(7).standard_normal((6, 64)).astype(np.float32)


def archive(folder: Path, labels: list[str] = LABELS) -> Path:
    path = folder / "model.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.write(models.mlp(folder / "mlp.onnx"), "model.onnx")
        file.writestr("labels.txt", "\n".join(labels))
    return path


@pytest.fixture(scope="module")
def expected(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], np.ndarray, np.ndarray]:
    folder = tmp_path_factory.mktemp("models")
    with Client(shared_stack.url, key=shared_stack.key) as client:
        client.push("lo-mlp", archive(folder), config=CONFIG, wait_s=60)
    session = onnxruntime.InferenceSession(folder / "mlp.onnx", providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input": ROWS})[0]
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    scores = (powers / powers.sum(-1, keepdims=True)).max(-1)
    return [LABELS[at] for at in logits.argmax(-1)], scores, logits


def body(rows: np.ndarray = ROWS, **more: Any) -> dict[str, Any]:
    given = {"name": "input", "datatype": "FP32", "shape": list(rows.shape), "data": rows.ravel().tolist()}
    return {"inputs": [given], **more}


def test_v2_answers_the_numbers_only_if_they_are_named(stack: Stack, expected: Any) -> None:
    labels, scores, logits = expected
    label, score = stack.http.post("/v2/models/lo-mlp/infer", json=body()).json()["outputs"]
    assert (label["name"], label["datatype"], label["shape"], label["data"]) == ("label", "BYTES", [6], labels)
    assert (score["name"], score["datatype"], score["shape"]) == ("score", "FP32", [6])
    np.testing.assert_allclose(score["data"], scores, rtol=1e-4)
    named = [{"name": "output"}, {"name": "label"}]
    numbers, again = stack.http.post("/v2/models/lo-mlp/infer", json=body(outputs=named)).json()["outputs"]
    np.testing.assert_allclose(np.reshape(numbers["data"], numbers["shape"]), logits, rtol=1e-4, atol=1e-5)
    assert again["data"] == labels
    with Client(stack.url, key=stack.key) as client:  # in binary form
        found = client.predict("lo-mlp", {"input": ROWS})
    assert set(found) == {"label", "score"}
    none = stack.http.post("/v2/models/lo-mlp/infer", json=body(ROWS[:0])).json()["outputs"]
    assert [(one["name"], one["shape"], one["data"]) for one in none] == [("label", [0], []), ("score", [0], [])]


def test_grpc(stack: Stack, expected: Any) -> None:
    labels, scores, _ = expected
    given = triton.InferInput("input", list(ROWS.shape), "FP32").set_data_from_numpy(ROWS)
    with triton.InferenceServerClient(stack.grpc) as client:
        metadata = client.get_model_metadata("lo-mlp")
        assert [(one.name, one.datatype, list(one.shape)) for one in metadata.outputs] == [
            ("label", "BYTES", [-1]),
            ("score", "FP32", [-1]),
            ("output", "FP32", [-1, 10]),
        ]
        found = client.infer("lo-mlp", [given])
        assert [one.decode() for one in found.as_numpy("label")] == labels
        np.testing.assert_allclose(found.as_numpy("score"), scores, rtol=1e-4)
        assert found.as_numpy("output") is None
        found = client.infer("lo-mlp", [given], outputs=[triton.InferRequestedOutput("output", class_count=1)])
        assert [one.decode().split(":")[2] for one in found.as_numpy("output").ravel()] == labels


def test_the_other_protocols(stack: Stack, expected: Any) -> None:
    labels, _, logits = expected
    rows = stack.http.post("/v1/models/lo-mlp:predict", json={"instances": ROWS.tolist()}).json()["predictions"]
    assert [row["label"] for row in rows] == labels
    assert all(row.keys() == {"label", "score"} for row in rows)
    columns = stack.http.post("/v1/models/lo-mlp:predict", json={"inputs": ROWS.tolist()}).json()["outputs"]
    assert columns["label"] == labels
    assert columns.keys() == {"label", "score"}
    target = {"X-Amzn-SageMaker-Target-Model": "lo-mlp"}
    assert (
        stack.http.post("/invocations", json={"instances": ROWS.tolist()}, headers=target).json()["predictions"] == rows
    )
    assert stack.http.post("/predictions/lo-mlp", json={"input": ROWS.tolist()}).json() == columns
    generated = stack.http.post("/v2/models/lo-mlp/generate", json={"input": ROWS[:1].tolist()}).json()
    assert (generated["label"], "output" in generated) == (labels[0], False)
    classified = stack.http.post("/v1/models/lo-mlp:classify", json={"examples": [{"input": ROWS[0].tolist()}]}).json()
    assert [label for label, _ in classified["result"][0]] == LABELS
    np.testing.assert_allclose([score for _, score in classified["result"][0]], logits[0], rtol=1e-4, atol=1e-5)


def test_requests_that_share_a_run_get_their_own_labels(stack: Stack, expected: Any) -> None:
    labels = expected[0]

    def ask(at: int) -> bool:
        first, last = at % 5, at % 5 + 1 + at % 2
        reply = stack.http.post("/v2/models/lo-mlp/infer", json=body(ROWS[first:last]))
        return bool(reply.json()["outputs"][0]["data"] == labels[first:last])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(200)))


def test_a_request_that_runs_in_parts(stack: Stack, expected: Any) -> None:
    labels = expected[0]
    many = stack.http.post("/v2/models/lo-mlp/infer", json=body(np.tile(ROWS, (50, 1)))).json()["outputs"]
    assert [one["name"] for one in many] == ["label", "score"]
    assert many[0]["data"] == labels * 50


def test_the_same_labels_are_the_same_version(stack: Stack, expected: Any, tmp_path: Path) -> None:
    sigmoid = {**CONFIG, "classes": {"output": "output", "scores": "sigmoid"}}
    file = archive(tmp_path)  # each has times of its own
    with Client(stack.url, key=stack.key) as client:
        first, again, other = (
            client.push("lo-same", file, config=config, wait_s=60)["version"] for config in (CONFIG, CONFIG, sigmoid)
        )
    assert (first, again, other) == (1, 1, 2)


def test_the_version_says_what_it_answers(stack: Stack, expected: Any) -> None:
    document = stack.http.get("/admin/v1/models/lo-mlp/versions/1").json()
    assert [spec["name"] for spec in document["outputs"]] == ["label", "score", "output"]
    assert [spec["on_request"] for spec in document["outputs"]] == [False, False, True]
    assert "output FP32 [-1, 10] (if named)" in Millstream(stack.home).ok("describe", "lo-mlp")
    assert document["batching_decided"] == "proven"
    config = stack.http.get("/v2/models/lo-mlp/config").json()
    assert [one["name"] for one in config["output"]] == ["label", "score", "output"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"classes": {"output": "output", "scores": "softmax"}}, "config.labels names no file"),
        ({**CONFIG, "classes": {"output": "other", "scores": "softmax"}}, "no output 'other'"),
        ({**CONFIG, "classes": {"output": "output", "scores": "argmax"}}, "softmax"),
        ({"labels": {"output": "source/model.onnx"}, "classes": CONFIG["classes"]}, "UTF-8|labels"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(stack: Stack, tmp_path: Path, config: Any, said: str) -> None:
    with Client(stack.url, key=stack.key) as client, pytest.raises(Failure) as refusal:
        client.push("lo-refused", archive(tmp_path), config=config)
    assert any(part in str(refusal.value) for part in said.split("|")), refusal.value


@pytest.mark.parametrize("labels", [LABELS[:9], [*LABELS, "more"], []])
def test_labels_are_as_many_as_classes(stack: Stack, tmp_path: Path, labels: list[str]) -> None:
    with Client(stack.url, key=stack.key) as client, pytest.raises(Failure, match="a floating-point number for each"):
        client.push("lo-refused", archive(tmp_path, labels), config=json.loads(json.dumps(CONFIG)))
