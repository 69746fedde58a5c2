"""Triton's generate and generate_stream: plain JSON in, plain JSON or events out."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.kit import models
from tests.kit.stack import Stack


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    push = shared_stack.push
    push("gen-text", models.identity(folder / "text.onnx", datatype="BYTES", shape=("N", 1)))
    push("gen-scale", models.scale(folder / "two.onnx", 2.0), version=1)
    push("gen-scale", models.scale(folder / "three.onnx", 3.0), version=2)
    push("gen-add", models.add_sub(folder / "add.onnx"))
    push("gen-lookup", models.failing(folder / "lookup.onnx"))


def post(stack: Stack, path: str, document: Any) -> httpx2.Response:
    return stack.http.post(f"/v2/models/{path}", content=json.dumps(document).encode())


@pytest.mark.parametrize(
    ("path", "document", "outputs"),
    [
        ("gen-text", {"x": "hello", "parameters": {"temperature": 0.1}, "stream": False}, {"y": "hello"}),
        ("gen-text", {"x": [["a"], ["b"]]}, {"y": ["a", "b"]}),
        ("gen-scale", {"x": [1, 2]}, {"y": [3.0, 6.0]}),
        (
            "gen-scale/versions/1",
            {"x": [[1, 2], [3, 4]], "id": "7", "timeout": 240_000_000},
            {"y": [2.0, 4.0, 6.0, 8.0]},
        ),
        ("gen-add", {"a": [1, 2, 3, 4], "b": [1, 1, 1, 1]}, {"sum": [2, 3, 4, 5], "difference": [0, 1, 2, 3]}),
        ("gen-lookup", {"index": 3}, {"y": 30.0}),
    ],
)
def test_generate_and_its_stream(stack: Stack, path: str, document: Any, outputs: Any) -> None:
    name, _, rest = path.partition("/versions/")
    version = rest or ("2" if name == "gen-scale" else "1")
    expected = {**outputs, "model_name": name, "model_version": version}
    if "id" in document:
        expected["id"] = document["id"]
    reply = post(stack, f"{path}/generate", document)
    assert (reply.status_code, reply.json()) == (200, expected), reply.text
    streamed = post(stack, f"{path}/generate_stream", document)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.text.startswith("data: ")
    assert streamed.text.endswith("\n\n")
    assert [json.loads(line) for line in streamed.text.split("data: ")[1:]] == [expected]


@pytest.mark.parametrize("call", ["generate", "generate_stream"])
def test_errors(stack: Stack, call: str) -> None:
    for path, document, status, error in (
        ("nope", {"x": "a"}, 404, "Request for unknown model: 'nope' is not found"),
        ("gen-scale/versions/9", {"x": [1, 2]}, 404, "Request for unknown model: 'gen-scale' version 9 is not found"),
        ("gen-text", [], 400, "not a JSON object"),
        ("gen-text", {}, 400, "missing required input"),
        ("gen-text", {"x": 1}, 400, "an integer where a string"),
        ("gen-text", {"x": "a", "other": [1]}, 400, "'other' is not an input"),
        ("gen-text", {"x": "a", "id": 1}, 400, "'id'"),
        ("gen-text", {"x": "a", "parameters": 1}, 400, "'parameters'"),
        ("gen-text", {"x": "a", "priority": -1}, 400, "'priority'"),
        ("gen-scale", {"x": 1}, 400, "unexpected shape"),
        ("gen-lookup", {"index": 99}, 500, "Integer division by zero"),
    ):
        reply = post(stack, f"{path}/{call}", document)
        assert reply.status_code == status, reply.text
        assert error in reply.json()["error"]
    reply = stack.http.get(f"/v2/models/gen-text/{call}")
    assert (reply.status_code, reply.json()) == (405, {"error": "Method Not Allowed"})
