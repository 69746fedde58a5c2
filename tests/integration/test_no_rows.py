"""A request for no rows: an empty answer in every protocol, without a run; and models that run alone on empty
tensors.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.kit import models
from tests.kit.stack import Stack, assert_quiet, running_stack

NONE = np.zeros((0, 4), np.float32)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("none")
    with running_stack(folder, settings={"shm_allow_clients": True}) as stack:
        stack.push("two", models.add_sub(folder / "two.onnx"))
        stack.push("flat", models.scale(folder / "flat.onnx"))
        stack.push("text", models.identity(folder / "text.onnx", datatype="BYTES"))
        stack.push("half", models.identity(folder / "half.onnx", datatype="BF16"))
        stack.push("open", models.identity(folder / "open.onnx", shape=("N", "M", 3)))
        stack.push("alone", models.identity(folder / "alone.onnx"), config='{"batching": false}')
        stack.push("largest", models.largest(folder / "largest.onnx"))
        yield stack


@pytest.fixture
def stack(one: Stack) -> Iterator[Stack]:
    yield one
    assert_quiet(one)


def runs(stack: Stack, model: str) -> tuple[int, int, int]:
    """Answered requests, inferences and runs, in Triton's statistics."""
    found = stack.http.get(f"/v2/models/{model}/stats").json()["model_stats"][0]
    return found["inference_stats"]["success"]["count"], found["inference_count"], found["execution_count"]


def v2(shape: list[int], datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "data": []}], **more}


@pytest.mark.parametrize("kind", [triton_http, triton_grpc], ids=["http", "grpc"])
@pytest.mark.parametrize("model", ["two", "two, binary", "two, classes"])
def test_triton_clients(stack: Stack, kind: Any, model: str) -> None:
    where = stack.url.removeprefix("http://") if kind is triton_http else stack.grpc
    name, _, how = model.partition(", ")
    before = runs(stack, name)
    with kind.InferenceServerClient(where) as client:
        inputs = [kind.InferInput(one, [0, 4], "FP32") for one in ("a", "b")]
        for one in inputs:
            one.set_data_from_numpy(NONE, *([] if how else [False] if kind is triton_http else []))
        outputs = [kind.InferRequestedOutput("sum", class_count=2)] if how == "classes" else None
        answer = client.infer(name, inputs, outputs=outputs)
    found = answer.as_numpy("sum")
    assert found.shape == ((0, 2) if how == "classes" else (0, 4))
    success, count, executions = runs(stack, name)
    assert (success, count, executions) == (before[0] + 1, before[1], before[2])


@pytest.mark.parametrize(
    ("model", "shape", "datatype", "wanted"),
    [("flat", [0, 2], "FP32", [0, 2]), ("text", [0, 2], "BYTES", [0, 2]), ("open", [0, 5, 3], "FP32", [0, 0, 3])],
)
def test_v2_json(stack: Stack, model: str, shape: list[int], datatype: str, wanted: list[int]) -> None:
    for more in ({}, {"id": "mine"}, {"parameters": {"binary_data_output": True}}):
        reply = stack.http.post(f"/v2/models/{model}/infer", json=v2(shape, datatype, **more))
        assert reply.status_code == 200, reply.text
        output = reply.json()["outputs"][0]
        assert (output["name"], output["datatype"], output["shape"]) == ("y", datatype, wanted)
        assert output.get("data", []) == []


def test_v2_with_a_datatype_that_has_no_json(stack: Stack) -> None:
    document = {"inputs": [{"name": "x", "shape": [0, 2], "datatype": "BF16", "parameters": {"binary_data_size": 0}}]}
    body = triton_http_body(document | {"parameters": {"binary_data_output": True}})
    reply = stack.http.post("/v2/models/half/infer", content=body[0], headers=body[1])
    assert (reply.status_code, reply.json()["outputs"][0]["shape"]) == (200, [0, 2])


def triton_http_body(document: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    head = json.dumps(document).encode()
    return head, {"Inference-Header-Content-Length": str(len(head))}


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


EMPTY = npy(np.zeros((0, 2), np.float32))
JSON = "application/json"
FLAT = {
    "signature": {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    },
    "example": {"instances": [[0.0, 0.0]]},
}


@pytest.mark.parametrize(
    ("path", "content_type", "body", "accept", "status", "wanted"),
    [
        ("/v1/models/flat:predict", JSON, b'{"inputs":[]}', JSON, 200, {"outputs": []}),
        ("/v1/models/flat:predict", JSON, b'{"inputs":{"x":[]}}', JSON, 200, {"outputs": []}),
        (
            "/v1/models/two:predict",
            JSON,
            b'{"inputs":{"a":[],"b":[]}}',
            JSON,
            200,
            {"outputs": {"sum": [], "difference": []}},
        ),
        ("/v1/models/flat:predict", JSON, b'{"instances":[]}', JSON, 400, {"error": "'instances' is empty", **FLAT}),
        ("/predictions/flat", "application/x-npy", EMPTY, JSON, 200, []),
        ("/endpoints/flat/invocations", JSON, b'{"inputs":{"x":[]}}', JSON, 200, {"predictions": [], "outputs": []}),
        ("/endpoints/flat/invocations", "application/x-npy", EMPTY, JSON, 200, {"predictions": []}),
        ("/endpoints/flat/invocations", "application/x-npy", EMPTY, "text/csv", 200, b""),
        ("/endpoints/flat/invocations", "application/x-npy", EMPTY, "application/x-npy", 200, EMPTY),
    ],
)
def test_other_protocols(
    stack: Stack, path: str, content_type: str, body: bytes, accept: str, status: int, wanted: Any
) -> None:
    reply = stack.http.post(path, content=body, headers={"Content-Type": content_type, "Accept": accept})
    assert reply.status_code == status, reply.text
    assert (reply.content if isinstance(wanted, bytes) else reply.json()) == wanted


@pytest.mark.parametrize(("path", "body"), [("/v2/models/flat/generate", b'{"x":[]}'), ("/predictions/flat", b"[]")])
def test_an_empty_list_is_one_row_without_columns_where_the_rows_may_be_left_out(
    stack: Stack, path: str, body: bytes
) -> None:
    reply = stack.http.post(path, content=body)
    assert reply.status_code == 400
    assert "Expected [-1,2], got [1,0]" in reply.text


def test_models_that_run_alone_run_on_empty_tensors_if_they_can(stack: Stack) -> None:
    before = runs(stack, "alone")
    reply = stack.http.post("/v2/models/alone/infer", json=v2([0, 2]))
    assert (reply.status_code, reply.json()["outputs"][0]["shape"]) == (200, [0, 2])
    assert runs(stack, "alone")[2] == before[2] + 1
    reply = stack.http.post("/v2/models/largest/infer", json=v2([0]))
    assert reply.status_code == 400, reply.text
    assert "the model takes no input without elements" in reply.json()["error"]


def test_no_columns_are_rows_all_the_same(stack: Stack) -> None:
    reply = stack.http.post("/v2/models/open/infer", json=v2([2, 0, 3]))
    assert (reply.status_code, reply.json()["outputs"][0]["shape"]) == (200, [2, 0, 3])
