"""Graphs on a running server: as their models one after the other, over each protocol, with errors that name steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.kit import models
from tests.kit.graphs import Array, call, outputs, push_graph, steps_of, upload
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

TWO = """
steps:
  double: {model: double, inputs: {x: x}}
  triple: {model: triple, inputs: {x: double.y}}
outputs:
  y: triple.y
  half: double.y
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("graphs")
    with running_stack(folder / "home", gateways=2) as running:
        running.push("double", models.scale(folder / "double.onnx", 2.0, 4))
        running.push("triple", models.scale(folder / "triple.onnx", 3.0, 4))
        push_graph(running, "two", TWO)
        yield running


def refusal(stack: Stack, text: str, name: str = "refused") -> str:
    reply = upload(stack, name, text)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"])


def infer(stack: Stack, name: str, array: Array, **more: Any) -> dict[str, Array]:
    return outputs(call(stack, name, array, **more))


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_a_graph_answers_as_its_models_one_after_the_other(stack: Stack) -> None:
    found = infer(stack, "two", X)
    assert set(found) == {"y", "half"}
    halves = infer(stack, "double", X)["y"]
    assert np.array_equal(found["half"], halves)
    assert np.array_equal(found["y"], infer(stack, "triple", halves)["y"])


def test_named_outputs_run_only_the_steps_that_they_need(stack: Stack) -> None:
    before = steps_of(stack, "double"), steps_of(stack, "triple")
    found = infer(stack, "two", X, outputs=[{"name": "half"}])
    assert np.array_equal(found["half"], 2 * X)
    assert set(found) == {"half"}
    assert (steps_of(stack, "double"), steps_of(stack, "triple")) == (before[0] + 1, before[1])


def test_large_tensors_and_many_rows(stack: Stack) -> None:
    """More than a run takes at once, in shared memory."""
    x = np.random.default_rng(1).random((40_000, 4), np.float32)
    assert np.allclose(infer(stack, "two", x)["y"], 6 * x)
    assert infer(stack, "two", np.empty((0, 4), np.float32))["y"].shape == (0, 4)


def test_a_graph_over_grpc_and_as_triton_describes_it(stack: Stack) -> None:
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        x = triton_grpc.InferInput("x", list(X.shape), "FP32")
        x.set_data_from_numpy(X)
        headers = stack.headers
        headers = {name.lower(): value for name, value in headers.items()}
        for outputs in (None, [triton_grpc.InferRequestedOutput("y")], [triton_grpc.InferRequestedOutput("y")]):
            found = client.infer("two", [x], outputs=outputs, headers=headers)
            assert np.array_equal(found.as_numpy("y"), 6 * X)
            assert (found.as_numpy("half") is None) is (outputs is not None)
        metadata = client.get_model_metadata("two", headers=headers)
        assert (metadata.platform, [one.name for one in metadata.outputs]) == ("ensemble", ["y", "half"])
        assert client.is_model_ready("two", headers=headers)
        statistics = client.get_inference_statistics("two", headers=headers).model_stats[0]
        assert statistics.inference_stats.success.count > statistics.execution_count > 0, "one had no rows"
        assert statistics.last_inference > 0


def test_the_page_of_a_graph_shows_its_steps(stack: Stack) -> None:
    version = stack.http.get("/admin/v1/models/two/versions/1").json()
    assert [(one["step"], one["model"], one["version"]) for one in version["steps"]] == [
        ("double", "double", 1),
        ("triple", "triple", 1),
    ]
    assert all(one["measured"]["answered"] > 0 for one in version["steps"])
    assert version["graph"]["steps"]["triple"]["inputs"] == {"x": ["double.y"]}
    assert (version["state"], version["pools"], version["instances"]) == ("ready", [], [])
    page = stack.metrics()
    assert page.value("millstream_step_duration_seconds_count", model="two", step="triple") > 0


def test_a_graph_serves_in_gateways_that_start_later(stack: Stack) -> None:
    before = {name: pid for name, pid in stack.pids().items() if name.startswith("gateway")}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(stack.pids().get(name, pid) != pid for name, pid in before.items()), what="they restarted")
    wait_until(lambda: stack.http.get("/v2/health/ready").status_code == 200, what="they are ready")
    stack.reconnect()
    for _ in range(8):
        assert np.array_equal(infer(stack, "two", X)["y"], 6 * X)


def test_steps_stay_at_the_version_that_served_when_the_graph_was_uploaded(stack: Stack, tmp_path: Path) -> None:
    graph = "steps:\n  a: {model: pinned, inputs: {x: x}}\noutputs: {y: a.y}\n"
    stack.push("pinned", models.scale(tmp_path / "1.onnx", 2.0, 4))
    assert push_graph(stack, "follows", graph)["version"] == 1
    stack.push("pinned", models.scale(tmp_path / "2.onnx", 5.0, 4))
    assert np.array_equal(infer(stack, "pinned", X)["y"], 5 * X)
    assert np.array_equal(infer(stack, "follows", X)["y"], 2 * X)
    again = push_graph(stack, "follows", graph)
    assert (again["version"], again["existing"]) == (2, False), "the same text, and other versions of its steps"
    assert np.array_equal(infer(stack, "follows", X)["y"], 5 * X)
    assert push_graph(stack, "follows", graph)["existing"] is True


def test_a_version_that_a_graph_runs_is_not_deleted_unless_forced(stack: Stack, tmp_path: Path) -> None:
    stack.push("used", models.scale(tmp_path / "1.onnx", 2.0, 4))
    push_graph(stack, "user", "steps:\n  a: {model: used, inputs: {x: x}}\noutputs: {y: a.y}\n")
    stack.push("used", models.scale(tmp_path / "2.onnx", 3.0, 4))
    for path in ("/admin/v1/models/used/versions/1", "/admin/v1/models/used"):
        refused = stack.http.delete(path)
        assert refused.status_code == 409, refused.text
        assert "version 1 of 'used' is a step of 'user' version 1" in refused.json()["error"]
    assert stack.http.delete("/admin/v1/models/used/versions/1", params={"force": True}).status_code == 204
    reply = call(stack, "user", X)
    assert reply.status_code == 503
    says = "model 'user' cannot serve: step 'a' (model used v1): the version was removed: upload the graph again"
    assert reply.json()["error"] == says
    assert stack.http.get("/admin/v1/models/user/versions/1").json()["reason"] in says
    assert stack.http.get("/v2/models/user/ready").status_code != 200
    assert push_graph(stack, "user", "steps:\n  a: {model: used, inputs: {x: x}}\noutputs: {y: a.y}\n")["version"] == 2
    assert np.array_equal(infer(stack, "user", X)["y"], 3 * X)


def test_what_does_not_fit_is_refused_at_upload_by_name(stack: Stack, tmp_path: Path) -> None:
    stack.push("narrow", models.scale(tmp_path / "narrow.onnx", 2.0, 2))
    then = "  b: {{model: double, inputs: {{x: a.y}}}}\noutputs: {{y: b.y}}\n"
    step = "steps:\n  a: {{model: {}, inputs: {{x: x}}}}\n" + then
    says = "step 'b' (model double v1), input 'x' takes the shape [-1, 4], and 'a.y' has [-1, 2]"
    assert says in refusal(stack, step.format("narrow"))
    assert "step 'a': Request for unknown model: 'dubble' is not found; did you mean 'double'?" in refusal(
        stack, step.format("dubble")
    )
    assert "a step of the graph would run 'two' itself" in refusal(stack, step.format("two"), "two")
    assert "refused" not in {one["name"] for one in stack.http.get("/admin/v1/models").json()["models"]}


def test_what_holds_for_models_of_workers_is_refused(stack: Stack) -> None:
    for config in ('{"pools": ["cpu"]}', '{"instances_max": 1}'):
        reply = upload(stack, "configured", TWO, config=config)
        assert reply.status_code == 400
        assert "a graph is run by the gateway" in reply.json()["error"]
    raced = stack.http.post("/admin/v1/models/two/versions/1/race", json={})
    assert raced.status_code == 400
    assert "race the models of its steps" in raced.json()["error"]


def test_graphs_in_graphs_to_a_bounded_depth(stack: Stack) -> None:
    inner = "two"
    for depth in range(2, 6):
        text = f"steps:\n  a: {{model: {inner}, inputs: {{x: x}}}}\noutputs: {{y: a.half}}\n".replace(
            "a.half", "a.half" if inner == "two" else "a.y"
        )
        if depth == 5:
            assert "graphs within graphs may be 4 deep" in refusal(stack, text)
            break
        inner = f"deep{depth}"
        push_graph(stack, inner, text)
    assert np.array_equal(infer(stack, "deep4", X)["y"], 2 * X)


def test_a_step_that_fails_is_named_and_the_status_is_its_own(stack: Stack, tmp_path: Path) -> None:
    stack.push("even", models.scale(tmp_path / "even.onnx", 1.0, 4))
    push_graph(stack, "fails", "steps:\n  a: {model: even, inputs: {x: x}}\noutputs: {y: a.y}\n")
    assert stack.http.post("/v2/repository/models/even/unload").status_code == 200
    wait_until(lambda: stack.http.get("/v2/models/fails/ready").status_code != 200)
    reply = call(stack, "fails", X)
    assert (reply.status_code, reply.json()["error"]) == (
        503,
        "model 'fails' cannot serve: step 'a' (model even v1): it is unloaded",
    )
    wrong = call(stack, "two", np.zeros((1, 3), np.float32))
    assert wrong.status_code == 400
    assert "for model 'two'" in wrong.json()["error"]
