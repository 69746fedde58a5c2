"""TensorFlow Serving's REST API and KServe's V1 protocol on the running product, with answers held to ONNX Runtime's
own.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import math
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import onnxruntime
import pytest

from tests.kit import models
from tests.kit.stack import ROOT, Stack, sigstopped
from tests.kit.tools import CLIENTS
from tests.kit.wait import wait_until

A = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]
B = [[0.5, 0.5, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]]
MLP_ROWS = np.random.default_rng(7).standard_normal((3, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, folder: Path) -> None:
    push = shared_stack.push
    push("tf-add", models.add_sub(folder / "add.onnx"), version=1)
    push("tf-add", models.add_sub(folder / "add.onnx"), version=2)
    push("tf-mlp", models.mlp(folder / "mlp.onnx"))
    push("tf-text", models.identity(folder / "text.onnx", datatype="BYTES", shape=("N",)))
    push("tf-half", models.identity(folder / "half.onnx", datatype="FP16"))
    push("tf-int", models.identity(folder / "int.onnx", datatype="INT64"))
    push("tf-bool", models.identity(folder / "bool.onnx", datatype="BOOL"))
    push("tf-turn", models.transpose(folder / "turn.onnx"))
    push("tf-length", models.variable_length(folder / "length.onnx"))
    push("tf-lookup", models.failing(folder / "lookup.onnx"))
    push("tf-slow", models.slow(folder / "slow.onnx", 20_000), config='{"rows_max": 1}')
    push("tf-one", models.identity(folder / "one.onnx", shape=("N", 1)))


def post(stack: Stack, path: str, document: Any, **options: Any) -> httpx2.Response:
    return stack.http.post(f"/v1/models/{path}", content=json.dumps(document).encode(), **options)


def answered(reply: httpx2.Response) -> Any:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    return json.loads(reply.text)


def refused(reply: httpx2.Response, status: int = 400) -> str:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    document = reply.json()
    assert {"error"} <= document.keys() <= {"error", "signature", "example", "example_python"}
    error: str = document["error"]
    return error


def test_predictions_are_those_of_onnx_runtime(stack: Stack, folder: Path) -> None:
    session = onnxruntime.InferenceSession(folder / "mlp.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, {"input": MLP_ROWS})[0]
    for document, key in (
        ({"instances": MLP_ROWS.tolist()}, "predictions"),
        ({"instances": [{"input": row} for row in MLP_ROWS.tolist()]}, "predictions"),
        ({"signature_name": "serving_default", "inputs": MLP_ROWS.tolist()}, "outputs"),
        ({"inputs": {"input": MLP_ROWS.tolist()}}, "outputs"),
    ):
        found = answered(post(stack, "tf-mlp:predict", document))
        assert list(found) == [key]
        np.testing.assert_allclose(np.array(found[key], np.float32), expected, rtol=1e-5)


@pytest.mark.parametrize("path", ["tf-add", "tf-add/versions/1", "tf-add/labels/serving", "tf-add/labels/stable"])
def test_several_inputs_and_outputs(stack: Stack, path: str) -> None:
    sums, differences = (np.add(A, B).tolist(), np.subtract(A, B).tolist())
    rows = answered(
        post(stack, f"{path}:predict", {"instances": [{"a": a, "b": b} for a, b in zip(A, B, strict=True)]})
    )
    assert rows == {
        "predictions": [
            {"sum": total, "difference": difference} for total, difference in zip(sums, differences, strict=True)
        ]
    }
    columns = answered(post(stack, f"{path}:predict", {"inputs": {"a": A, "b": B}}))
    assert columns == {"outputs": {"sum": sums, "difference": differences}}


def test_text_and_base64(stack: Stack) -> None:
    encoded = {"b64": base64.b64encode("é".encode()).decode()}
    for document in ({"instances": ["a", encoded]}, {"instances": [{"x": "a"}, {"x": encoded}]}):
        assert answered(post(stack, "tf-text:predict", document)) == {"predictions": ["a", "é"]}
    assert answered(post(stack, "tf-text:predict", {"instances": [encoded]})) == {"predictions": ["é"]}
    assert answered(post(stack, "tf-text:predict", {"inputs": [encoded]})) == {"outputs": ["é"]}
    assert "not UTF-8" in refused(post(stack, "tf-text:predict", {"instances": [{"b64": "/w=="}]}))


def test_numbers_that_json_has_no_words_for(stack: Stack) -> None:
    found = answered(post(stack, "tf-half:predict", {"instances": [[math.nan, math.inf], [-math.inf, 0.5]]}))
    assert math.isnan(found["predictions"][0][0])
    assert found["predictions"][0][1] == math.inf
    assert found["predictions"][1] == [-math.inf, 0.5]
    large = [[2**63 - 1, -(2**63)]]
    assert answered(post(stack, "tf-int:predict", {"instances": large})) == {"predictions": large}
    truth = [[True, False]]
    assert answered(post(stack, "tf-bool:predict", {"inputs": truth})) == {"outputs": truth}


def test_a_model_that_does_not_batch(stack: Stack) -> None:
    matrix = np.arange(12, dtype=float).reshape(3, 4)
    assert answered(post(stack, "tf-turn:predict", {"inputs": matrix.tolist()})) == {"outputs": matrix.T.tolist()}
    assert answered(post(stack, "tf-turn:predict", {"instances": matrix.tolist()})) == {
        "predictions": matrix.T.tolist()
    }
    assert "Expected [3,4], got [1,4]" in refused(post(stack, "tf-turn:predict", {"instances": matrix[:1].tolist()}))


def test_bodies_may_be_compressed_and_large(stack: Stack) -> None:
    document = json.dumps({"instances": [[float(column) for column in range(50_000)]]}).encode()
    for encoding, body in (("gzip", gzip.compress(document)), ("deflate", zlib.compress(document))):
        reply = stack.http.post("/v1/models/tf-length:predict", content=body, headers={"Content-Encoding": encoding})
        assert answered(reply)["predictions"][0]["doubled"][:3] == [0, 2, 4]
    reply = stack.http.post("/v1/models/tf-length:predict", content=document, headers={"Content-Encoding": "br"})
    assert "Unsupported compression" in refused(reply, 415)
    reply = stack.http.post("/v1/models/tf-length:predict", content=b"{}" * 20, headers={"Content-Encoding": "gzip"})
    assert "not valid gzip" in refused(reply)


def test_classes_and_values(stack: Stack) -> None:
    found = answered(post(stack, "tf-mlp:classify", {"examples": [{"input": row} for row in MLP_ROWS.tolist()]}))
    predicted = answered(post(stack, "tf-mlp:predict", {"instances": MLP_ROWS.tolist()}))["predictions"]
    assert [[score for _, score in pairs] for pairs in found["result"]] == predicted
    assert [label for label, _ in found["result"][0]] == [str(number) for number in range(10)]
    for examples in ({"examples": [{"x": 1.5}, {"x": [2]}]}, {"context": {"x": 1.5}, "examples": [{}, {"x": 2}]}):
        for version in ("", "/versions/1", "/labels/serving"):
            assert answered(post(stack, f"tf-one{version}:regress", examples)) == {"result": [1.5, 2.0]}
    two = {"examples": [{"a": A[0], "b": B[0]}]}
    assert "cannot classify" in refused(post(stack, "tf-add/labels/serving:classify", two))
    assert "cannot regress" in refused(post(stack, "tf-add/versions/1:regress", two))
    assert "cannot regress" in refused(post(stack, "tf-mlp:regress", {"examples": [{"input": MLP_ROWS[0].tolist()}]}))


@pytest.mark.parametrize(
    ("model", "document", "error"),
    [
        ("tf-mlp", {}, "either 'instances' (row form) or 'inputs'"),
        ("tf-mlp", {"instances": [[0.0] * 64], "inputs": [[0.0] * 64]}, "either 'instances'"),
        ("tf-mlp", {"instances": 1}, "Expected 'instances' to be a list"),
        ("tf-mlp", {"instances": {"input": [0.0] * 64}}, "Expected 'instances' to be a list"),
        ("tf-mlp", {"instances": []}, "'instances' is empty"),
        ("tf-mlp", [1], "a JSON object with 'instances' or 'inputs'"),
        ("tf-mlp", {"instances": [[0.0] * 63]}, "Expected [-1,64], got [1,63]"),
        ("tf-mlp", {"instances": [[0.0] * 64, [0.0] * 63]}, "at [1]: a list of 63 where its neighbours have 64"),
        ("tf-mlp", {"instances": [["0"] * 64]}, "at [0][0]: a string where FP32"),
        ("tf-mlp", {"instances": [{"y": [0.0] * 64}]}, "unexpected inference input 'y'"),
        ("tf-mlp", {"inputs": {"y": 1}}, "unexpected inference input 'y'"),
        ("tf-mlp", {"signature_name": "other", "instances": [[0.0] * 64]}, '"other" not found'),
        ("tf-mlp", {"signature_name": [1], "instances": [[0.0] * 64]}, "not found"),
        ("tf-add", {"instances": [[1.0]]}, "takes 2 inputs"),
        ("tf-add", {"inputs": [[1.0]]}, "takes 2 inputs"),
        ("tf-add", {"instances": [{"a": A[0]}]}, "missing required input(s) ['b']"),
        ("tf-add", {"instances": [{"a": A[0], "b": B[0]}, {"a": A[1]}]}, "instances[1] names other inputs"),
        ("tf-add", {"inputs": {"a": A, "b": B[:1]}}, "batch size does not match"),
        ("tf-int", {"instances": [[1.5, 1]]}, "a number with a fraction where INT64"),
        ("tf-int", {"instances": [[2**63, 1]]}, "out of the range of INT64"),
    ],
)
def test_what_is_wrong_is_said(stack: Stack, model: str, document: Any, error: str) -> None:
    assert error in refused(post(stack, f"{model}:predict", document))


def test_what_is_not_there(stack: Stack) -> None:
    body = {"instances": [1]}
    for path, error in (
        ("nope", "Servable not found for request: Latest(nope)"),
        ("tf-add/versions/9", "Servable not found for request: Specific(tf-add, 9); it has versions 2 and 1"),
        ("tf-add/versions/one", "Servable not found for request: Specific(tf-add, one); it has versions 2 and 1"),
        ("tf-add/labels/canary", "Unrecognized servable version label: canary; known: serving, stable"),
    ):
        assert refused(post(stack, f"{path}:predict", body), 404) == error
        assert refused(stack.http.get(f"/v1/models/{path}"), 404) == error
        assert refused(stack.http.get(f"/v1/models/{path}/metadata"), 404) == error
    assert refused(stack.http.put("/v1/models/tf-add:predict"), 405) == "Method Not Allowed"
    assert refused(stack.http.post("/v1/models/tf-add"), 405) == "Method Not Allowed"
    assert "not supported" in refused(post(stack, "tf-add:explain", body), 501)
    assert "failed to parse" in refused(stack.http.post("/v1/models/tf-add:predict", content=b"{"))
    assert "Integer division by zero" in refused(post(stack, "tf-lookup:predict", {"instances": [[99]]}), 500)


def test_status_and_lists_serve_three_kinds_of_clients(stack: Stack) -> None:
    assert stack.http.get("/").json() == {"status": "alive"}
    document = answered(stack.http.get("/v1/models/tf-add"))
    assert document.pop("created") > 1_700_000_000
    assert document == {
        "name": "tf-add",
        "ready": True,
        "model_version_status": [
            {"version": str(version), "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
            for version in (2, 1)
        ],
        "id": "tf-add",
        "object": "model",
        "owned_by": "millstream",
    }
    one = answered(stack.http.get("/v1/models/tf-add/versions/1"))
    assert [status["version"] for status in one["model_version_status"]] == ["1"]
    listed = answered(stack.http.get("/v1/models"))
    assert {"tf-add", "tf-mlp"} <= set(listed["models"])
    assert listed["models"] == [card["id"] for card in listed["data"]]
    assert listed["object"] == "list"


@pytest.mark.parametrize("path", ["tf-mlp", "tf-mlp/versions/1", "tf-mlp/labels/stable"])
def test_metadata_is_a_signature_def(stack: Stack, path: str) -> None:
    document = answered(stack.http.get(f"/v1/models/{path}/metadata"))
    assert document["model_spec"] == {"name": "tf-mlp", "signature_name": "", "version": "1"}
    signature = document["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    assert signature["inputs"] == {
        "input": {
            "dtype": "DT_FLOAT",
            "tensor_shape": {"dim": [{"size": "-1", "name": ""}, {"size": "64", "name": ""}], "unknown_rank": False},
            "name": "input",
        }
    }
    assert list(signature["outputs"]) == ["output"]


def test_cloud_events(stack: Stack) -> None:
    data = {"instances": [[1.0], [2.0]]}
    attributes = {"specversion": "1.0", "id": "36077800", "source": "here", "type": "ask"}
    headers = {f"ce-{name}": value for name, value in attributes.items()}
    reply = post(stack, "tf-one:predict", data, headers=headers)
    assert answered(reply) == {"predictions": [[1.0], [2.0]]}
    assert reply.headers["ce-specversion"] == "1.0"
    assert reply.headers["ce-source"] == "io.millstream.inference.tf-one"
    assert {"ce-id", "ce-type", "ce-time"} <= set(reply.headers)

    structured = {"content-type": "application/cloudevents+json; charset=utf-8"}
    for event in (
        {**attributes, "data": data},
        {**attributes, "data_base64": base64.b64encode(json.dumps(data).encode()).decode()},
    ):
        reply = post(stack, "tf-one:predict", event, headers=structured)
        assert reply.headers["content-type"] == "application/cloudevents+json"
        assert reply.json()["data"] == {"predictions": [[1.0], [2.0]]}
        assert reply.json()["specversion"] == "1.0"
    for broken, error in (
        ({**attributes}, "no 'data'"),
        ({**attributes, "data_base64": "%"}, "not base64"),
        ({**attributes, "specversion": "0.3", "data": data}, "1.0 is spoken"),
        ({**attributes, "id": 1, "data": data}, "no 'id'"),
        ([], "not a JSON object"),
    ):
        assert error in refused(post(stack, "tf-one:predict", broken, headers=structured))
    assert "no 'type'" in refused(post(stack, "tf-one:predict", data, headers={**headers, "ce-type": ""}))


def test_requests_of_clients_that_go_away_are_dropped(stack: Stack) -> None:
    body = json.dumps({"instances": [[1.0] * 128]}).encode()

    def dropped() -> float:
        return stack.metrics().value("millstream_requests_total", model="tf-slow", outcome="cancelled")

    before = dropped()
    with sigstopped(*(pid for name, pid in stack.pids().items() if name.startswith("cpu-"))):
        sent = [stack.send("/v1/models/tf-slow:predict", body) for _ in range(48)]
        wait_until(lambda: stack.metrics().value("millstream_lane_rows", model="tf-slow") >= 4, what="some wait")
        for connection in sent:
            connection.close()
        wait_until(lambda: dropped() > before, what="a request was dropped")
    stack.settled("tf-slow", 1)  # workers that were stopped for longer than a lease were taken for gone


@pytest.mark.needs("kserve")
def test_kserves_own_client(stack: Stack) -> None:
    done = subprocess.run(
        [CLIENTS / "bin" / "python", "-P", ROOT / "tests/integration/programs/kserve_client.py", stack.url, "tf-mlp"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    row = [float(column) for column in range(64)]
    expected = answered(post(stack, "tf-mlp:predict", {"instances": [row]}))["predictions"]
    v1, v2 = found["v1"], found["v2"]
    assert v1["predict"] == {"predictions": expected}
    assert v1["ready"] is True
    assert "404" in v1["unknown_ready"]
    assert "Expected 'instances' to be a list" in v1["bad"]
    assert "404" in v1["unknown"]
    assert "501" in v1["explain"]
    np.testing.assert_allclose(v2["infer"], expected, rtol=1e-5)
    assert v2["ready"] is v2["server_ready"] is v2["server_live"] is True


def test_classes_have_the_names_that_came_with_the_version(stack: Stack, folder: Path) -> None:
    path = folder / "named.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.write(folder / "mlp.onnx", "model.onnx")
        packed.writestr("digits.txt", "\n".join(f"digit {number}" for number in range(10)))
    stack.push("tf-named", path, config=json.dumps({"labels": {"output": "source/digits.txt"}}))
    found = answered(post(stack, "tf-named:classify", {"examples": [{"input": MLP_ROWS[0].tolist()}]}))
    assert [label for label, _ in found["result"][0]] == [f"digit {number}" for number in range(10)]
    v2 = {"name": "input", "shape": [1, 64], "datatype": "FP32", "data": MLP_ROWS[0].tolist()}
    asked = {"inputs": [v2], "outputs": [{"name": "output", "parameters": {"classification": 1}}]}
    headers = {"X-Amzn-SageMaker-Target-Model": "tf-named"}
    classes = answered(stack.http.post("/invocations", json=asked, headers=headers))["outputs"][0]["data"]
    best = max(found["result"][0], key=lambda pair: pair[1])
    assert classes[0].split(":")[2] == best[0]


def test_many_small_compressed_bodies_at_once(stack: Stack) -> None:
    """What they may become is bounded by what they are: all of them are taken."""
    body = gzip.compress(json.dumps({"instances": [[1.0]]}).encode())

    async def statuses() -> set[int]:
        async with httpx2.AsyncClient(base_url=stack.url, timeout=300, trust_env=False) as client:
            headers = {"Content-Encoding": "gzip"}
            asked = [client.post("/v1/models/tf-one:predict", content=body, headers=headers) for _ in range(200)]
            return {reply.status_code for reply in await asyncio.gather(*asked)}

    assert asyncio.run(statuses()) == {200}
