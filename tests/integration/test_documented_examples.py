"""Every example of an inference operation in the OpenAPI document of a running gateway is answered as it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from millstream.gateway.http.openapi_document import operations
from tests.kit import models
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until


class Call(NamedTuple):
    """An operation with the values of the document."""

    operation: str
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("documented")) as running:
        yield running


def calls(stack: Stack) -> list[Call]:
    """Return the calls that a click on Execute sends: those whose path is filled, with each example of a body."""
    document = stack.http.get("/openapi.json").raise_for_status().json()
    found = []
    for path, method, operation in operations(document):
        parameters = operation.get("parameters", [])
        values = {one["name"]: str(one["example"]) for one in parameters if one["in"] == "path" and "example" in one}
        if not all(one["name"] in values for one in parameters if one["in"] == "path"):
            continue
        headers = {one["name"]: str(one["example"]) for one in parameters if one["in"] == "header" and "example" in one}
        url = path.format_map({name: quote(value) for name, value in values.items()})
        contents = operation.get("requestBody", {}).get("content", {})
        for kind, body in contents.items():
            if "example" in body:
                found.append(
                    Call(operation["operationId"], method, url, {"content-type": kind, **headers}, body["example"])
                )
        if method == "get":
            found.append(Call(operation["operationId"], method, url, headers, None))
    return found


def send(stack: Stack, call: Call) -> tuple[int, str]:
    text = isinstance(call.body, str) and not call.headers["content-type"].endswith("json")
    body: dict[str, Any] = {"content": call.body} if text else {"json": call.body}
    reply = stack.http.request(call.method, call.path, headers=call.headers, **({} if call.body is None else body))
    return reply.status_code, reply.text


def _answered(stack: Stack, call: Call) -> bool:
    return send(stack, call)[0] == 200


def inference(stack: Stack, model: str) -> dict[str, tuple[int, str]]:
    """Send the examples of inference; return status and body by operation and type of the body."""
    return {
        f"{call.operation} {call.headers['content-type']}": send(stack, call)
        for call in calls(stack)
        if model in call.path or model in str(call.headers) or model in str(call.body) or call.path == "/invocations"
        if call.body is not None
    }


#: not every model can classify, regress or embed
SPECIAL = ("v1_classify", "v1_regress", "create_embeddings")


def test_every_example_of_every_kind_of_model_is_answered(stack: Stack, tmp_path: Path) -> None:
    built = {
        "y-mlp": models.mlp(tmp_path / "mlp.onnx"),
        "x-alone": models.row_mixing(tmp_path / "alone.onnx"),
        "w-lengths": models.variable_length(tmp_path / "lengths.onnx"),
        "v-two": models.add_sub(tmp_path / "two.onnx"),
        **{
            f"u{at}-{datatype.lower()}": models.identity(tmp_path / f"{datatype}.onnx", datatype)
            for at, datatype in enumerate(("INT64", "BOOL", "BYTES", "UINT8", "FP64"))
        },
    }
    for name, path in built.items():
        stack.push(name, path)
    for name in sorted(built):  # the first by name is the example's
        found = inference(stack, name)
        assert {"infer application/json", "v1_predict application/json", "generate application/json"} <= set(found)
        wrong = {call: reply for call, reply in found.items() if reply[0] != 200 and not call.startswith(SPECIAL)}
        assert wrong == {}, name
        assert all(status in {200, 400} for status, _ in found.values())
        stack.http.delete(f"/admin/v1/models/{name}").raise_for_status()


def test_embeddings_and_classes(stack: Stack, tmp_path: Path) -> None:
    stack.push("embedder", models.embeddings(tmp_path / "e.onnx"))
    stack.push("scores", models.mlp(tmp_path / "scores.onnx"))
    found = {call.operation: send(stack, call) for call in calls(stack) if call.body is not None}
    assert found["create_embeddings"][0] == 200, found["create_embeddings"]
    stack.http.delete("/admin/v1/models/embedder").raise_for_status()
    found = {call.operation: send(stack, call) for call in calls(stack) if call.body is not None}
    assert found["v1_classify"][0] == 200, found["v1_classify"]
    stack.http.delete("/admin/v1/models/scores").raise_for_status()


def test_every_get_is_answered(stack: Stack, tmp_path: Path) -> None:
    stack.push("seen", models.mlp(tmp_path / "seen.onnx"))
    found = {call.operation: send(stack, call)[0] for call in calls(stack) if call.method == "get"}
    assert len(found) >= 25
    for call in calls(stack):
        if call.method == "get" and found[call.operation] == 503:  # not ready for a moment
            wait_until(partial(_answered, stack, call), what=call.operation)
            found[call.operation] = 200
    assert {name for name, status in found.items() if status != 200} <= {
        "system_shared_memory_status",  # 501: not allowed here
        "get_race",  # 404: the version had none
    }
    stack.http.delete("/admin/v1/models/seen").raise_for_status()


def test_a_model_too_large_to_show_has_no_body_and_a_small_one_is_taken_instead(stack: Stack, tmp_path: Path) -> None:
    stack.push("a-large", models.identity(tmp_path / "large.onnx", "FP32", ("N", 5000)))
    assert not [call for call in calls(stack) if call.body is not None and "a-large" in call.path]
    assert "/v2/models/a-large" in {call.path for call in calls(stack)}
    stack.push("b-small", models.mlp(tmp_path / "small.onnx"))
    assert "/v2/models/b-small/infer" in {call.path for call in calls(stack)}
    for name in ("a-large", "b-small"):
        stack.http.delete(f"/admin/v1/models/{name}").raise_for_status()
