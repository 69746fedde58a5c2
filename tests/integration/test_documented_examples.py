"""Every example of inference in the OpenAPI document is answered by the digits example as it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from millstream.gateway.http.openapi_document import operations
from tests.kit.command_line import DIGITS
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
        running.push("digits", DIGITS / "digits.onnx")
        yield running


#: operations that the digits example answers: not those that embed texts, classify or regress
INFERENCE = ("infer", "generate", "v1_predict", "invocations", "invoke", "torchserve_predict")


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


def test_every_example_of_inference_is_answered_by_the_digits_example(stack: Stack) -> None:
    bodies = [call for call in calls(stack) if call.method == "post" and call.operation.startswith(INFERENCE)]
    found = {f"{call.operation} {call.headers['content-type']}": send(stack, call) for call in bodies}
    assert {"infer application/json", "v1_predict application/json", "generate application/json"} <= set(found)
    assert "invocations text/csv" in found
    assert {call: reply for call, reply in found.items() if reply[0] != 200} == {}


def test_every_get_is_answered(stack: Stack) -> None:
    found = {call.operation: send(stack, call)[0] for call in calls(stack) if call.method == "get"}
    assert len(found) >= 25
    for call in calls(stack):
        if call.method == "get" and found[call.operation] == 503:  # not ready for a moment
            wait_until(partial(_answered, stack, call), what=call.operation)
            found[call.operation] = 200
    assert {name for name, status in found.items() if status != 200} <= {
        "system_shared_memory_status",  # 501: not allowed here
        "get_race",  # 404: the version had none
        "get_function",  # 404: the version is none
    }
