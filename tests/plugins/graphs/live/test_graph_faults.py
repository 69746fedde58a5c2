"""What goes wrong in a step: the request ends with the step's name, its other steps end, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.kit import models
from tests.kit.graphs import body, call, outputs, push_graph, steps_of, upload
from tests.kit.stack import CALL_S_MAX, Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

X = np.ones((1, 4), np.float32)
TWO = """
steps:
  double: {model: double, inputs: {x: x}}
  triple: {model: triple, inputs: {x: double.y}}
outputs: {y: triple.y}
"""
WAITING_MAX = 8
SETTINGS = {
    "admin_key": "admin",
    "queue_rows_max": WAITING_MAX,
    "reply_bytes_max": 1 << 20,
    "inflight_requests_max": 64,
    "versions_kept": 1,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("faults")
    with running_stack(folder / "home", settings=SETTINGS) as running:
        running.push("double", models.scale(folder / "double.onnx", 2.0, 4))
        running.push("triple", models.scale(folder / "triple.onnx", 3.0, 4))
        running.push("failing", models.failing(folder / "failing.onnx"))
        running.push("fragile", models.fragile(folder / "fragile.onnx"))
        running.push("wide", models.spread(folder / "wide.onnx", 1 << 16))
        push_graph(running, "two", TWO)
        yield running
        assert_quiet(running)


def worker(stack: Stack) -> int:
    return stack.pids()["cpu-0"]


def in_flight(stack: Stack) -> float:
    return stack.metrics().value("millstream_requests_in_flight")


def test_a_step_that_fails_has_the_status_of_its_model(stack: Stack) -> None:
    graph = "steps:\n  a: {model: failing, inputs: {index: index}}\noutputs: {y: a.y}\n"
    push_graph(stack, "looked", graph)
    for index in (np.array([[100]]), np.array([[3]])):
        alone, through = call(stack, "failing", index, tensor="index"), call(stack, "looked", index, tensor="index")
        assert through.status_code == alone.status_code
        if through.status_code == 200:
            assert np.array_equal(outputs(through)["y"], outputs(alone)["y"])
        else:
            assert through.json()["error"] == f"step 'a' (model failing v1): {alone.json()['error']}"


def test_a_step_whose_worker_dies_is_named_and_another_graph_goes_on(stack: Stack) -> None:
    push_graph(stack, "deadly", "steps:\n  a: {model: fragile, inputs: {x: x}}\noutputs: {y: a.y}\n")
    ok = call(stack, "deadly", np.array([[1]]))
    assert ok.status_code == 200
    died = call(stack, "deadly", np.array([[-1]]))
    says = "step 'a' (model fragile v1): the worker died every time it ran this request"
    assert (died.status_code, died.json()["error"]) == (500, says)
    assert np.array_equal(outputs(call(stack, "two", X))["y"], 6 * X)


def test_a_worker_that_dies_between_two_steps_loses_no_request(stack: Stack) -> None:
    """The first step is answered; the second waits for a worker that is killed before it gets it."""
    calls = Calls(stack, "two", 4)
    with sigstopped(worker(stack)):
        calls.begin()
        wait_until(lambda: in_flight(stack) >= 4, what="the steps wait")
        os.kill(worker(stack), signal.SIGKILL)
    assert [reply.status_code for reply in calls.ended()] == [200] * 4


class Calls:
    """Calls of a graph, each in a thread."""

    def __init__(self, stack: Stack, name: str, count: int, **parameters: Any) -> None:
        self._replies: list[httpx2.Response] = []
        content = json.dumps(body(X, parameters=parameters)).encode()

        def run() -> None:
            with httpx2.Client(
                base_url=stack.url, headers=stack.headers, timeout=CALL_S_MAX, trust_env=False
            ) as client:
                self._replies.append(client.post(f"/v2/models/{name}/infer", content=content))

        self._threads = [threading.Thread(target=run) for _ in range(count)]

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def ended(self) -> list[httpx2.Response]:
        for thread in self._threads:
            thread.join(CALL_S_MAX)
        return self._replies


def test_a_step_that_is_overloaded_refuses_the_request_and_says_when_to_try_again(stack: Stack) -> None:
    calls = Calls(stack, "two", 3 * WAITING_MAX, timeout=5_000_000)
    with sigstopped(worker(stack)):
        calls.begin()
        wait_until(lambda: steps_of(stack, "double", "overloaded") > 0, what="a step was refused")
    replies = calls.ended()
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused
    assert {reply.status_code for reply in replies} <= {200, 429, 504}
    for reply in refused:
        assert reply.json()["error"].startswith("step 'double' (model double v1): ")
        assert int(reply.headers["retry-after"]) >= 1
    wait_until(lambda: in_flight(stack) == 0, what="no permit is left")


def test_a_deadline_is_one_for_the_whole(stack: Stack) -> None:
    with sigstopped(worker(stack)):
        late = call(stack, "two", X, parameters={"timeout": 300_000})
        assert late.status_code == 504
        assert late.json()["error"].startswith("step 'double' (model double v1): the deadline passed")
    assert call(stack, "two", X).status_code == 200
    wait_until(lambda: in_flight(stack) == 0, what="no permit is left")


def test_the_steps_of_a_caller_who_goes_are_withdrawn(stack: Stack) -> None:
    content = json.dumps(body(X)).encode()
    before = steps_of(stack, "triple")
    with sigstopped(worker(stack)):
        connections = [stack.send("/v2/models/two/infer", content, stack.headers) for _ in range(4)]
        wait_until(lambda: in_flight(stack) >= 4, what="the steps wait")
        for connection in connections:
            connection.close()
        wait_until(lambda: in_flight(stack) == 0, what="graphs and steps are withdrawn")
    assert call(stack, "two", X).status_code == 200
    assert steps_of(stack, "triple") == before + 1, "of those who have gone, no second step ran"
    assert steps_of(stack, "double", "cancelled") >= 4


def test_tensors_between_steps_are_bounded(stack: Stack) -> None:
    """Each step's outputs fit into a reply, and those of all do not."""
    ways = {f"w{n}": {"model": "wide", "inputs": {"x": "x"}} for n in range(6)}
    push_graph(stack, "bounded", {"steps": ways, "outputs": {f"y{n}": f"w{n}.y" for n in range(6)}})
    x = np.ones((1, 1), np.float32)
    assert call(stack, "bounded", x, outputs=[{"name": "y0"}, {"name": "y1"}]).status_code == 200
    reply = call(stack, "bounded", x)
    assert reply.status_code == 413
    assert "the tensors between the steps take" in reply.json()["error"]
    wait_until(lambda: in_flight(stack) == 0, what="the steps that ran beside have ended")


def test_a_key_needs_the_right_to_the_graph_alone_and_an_upload_that_to_its_steps(stack: Stack) -> None:
    def key(name: str, *scopes: str) -> dict[str, str]:
        made = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": list(scopes)})
        assert made.status_code == 201, made.text
        return {"Authorization": f"Bearer {made.json()['key']}"}

    caller, writer = key("caller", "infer:two"), key("writer", "models:write:mine", "infer:double")
    with httpx2.Client(base_url=stack.url, trust_env=False, timeout=60) as client:
        reply = client.post("/v2/models/two/infer", json=body(X), headers=caller)
        assert reply.status_code == 200, reply.text
        assert client.post("/v2/models/double/infer", json=body(X), headers=caller).status_code == 403
        path = "/admin/v1/models/mine/versions"
        refused = client.post(path, content=TWO.encode(), headers=writer)
        assert (refused.status_code, "infer:triple" in refused.text) == (403, True)
        one = "steps:\n  a: {model: double, inputs: {x: x}}\noutputs: {y: a.y}\n"
        assert client.post(path, params={"wait": 30}, content=one.encode(), headers=writer).status_code == 201
    page = stack.metrics()
    assert page.value("millstream_key_rows_total", key="caller") == 1
    assert page.value("millstream_key_run_seconds_total", key="caller") > 0


def test_old_versions_that_a_graph_runs_are_kept(stack: Stack, tmp_path: Any) -> None:
    stack.push("kept", models.scale(tmp_path / "1.onnx", 2.0, 4))
    push_graph(stack, "keeps", "steps:\n  a: {model: kept, inputs: {x: x}}\noutputs: {y: a.y}\n")
    for number in range(2, 5):
        stack.push("kept", models.scale(tmp_path / f"{number}.onnx", 1.0 + number, 4))
    versions = {one["version"] for one in stack.http.get("/admin/v1/models/kept").json()["versions"]}
    assert versions == {1, 3, 4}, "1 is used; 3 served before 4"
    assert np.array_equal(outputs(call(stack, "keeps", X))["y"], 2 * X)


def test_an_upload_that_is_no_graph_after_all(stack: Stack) -> None:
    reply = upload(stack, "broken", "steps:\n  a: [1\noutputs: 1\n")
    assert reply.status_code == 400
    assert "the graph is not YAML" in reply.json()["error"]
