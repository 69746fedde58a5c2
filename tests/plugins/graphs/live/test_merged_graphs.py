"""Graphs that become one ONNX model at their upload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import onnx
import pytest

from tests.kit import models
from tests.kit.graphs import call, outputs, push_graph, steps_of, upload
from tests.kit.stack import Stack, running_stack

X = np.arange(8, dtype=np.float32).reshape(2, 4)
FUNCTION = "def f(x: float) -> float:\n    return x\n"


def chain(first: str, second: str, **more: Any) -> dict[str, Any]:
    steps = {"a": {"model": first, "inputs": {"x": "x"}}, "b": {"model": second, "inputs": {"x": "a.y"}}}
    return {"merge": True, "steps": steps, "outputs": {"y": "b.y", "between": "a.y"}, **more}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("merged")
    with running_stack(folder / "home", settings={"admin_key": "admin"}) as running:
        running.push("double", models.scale(folder / "double.onnx", 2.0, 4))
        running.push("triple", models.scale(folder / "triple.onnx", 3.0, 4))
        yield running


def pushed(stack: Stack, folder: Path, name: str, factor: float) -> None:
    stack.push(name, models.scale(folder / f"{name}-{factor}.onnx", factor, 4))


def test_one_model_answers_what_its_steps_do_without_their_calls(stack: Stack) -> None:
    document = push_graph(stack, "merged", chain("double", "triple"))
    push_graph(stack, "apart", chain("double", "triple", merge=False))
    assert [(step["step"], step["model"]) for step in document["steps"]] == [("a", "double"), ("b", "triple")]
    assert document["notes"][0].startswith("One model of 2 steps: its run took ")
    assert document["batching"]
    alone = push_graph(stack, "rowless", chain("double", "triple"), config='{"batching": false}')
    assert (alone["notes"][0].startswith("One model of 2 steps"), alone["batching"]) == (True, False)
    merged, apart = outputs(call(stack, "merged", X)), outputs(call(stack, "apart", X))
    assert list(merged) == list(apart) == ["y", "between"]
    for name in merged:
        assert np.array_equal(merged[name], apart[name])
    assert steps_of(stack, "double") == 1, "of the graph whose steps stayed apart"
    named = outputs(call(stack, "merged", X, outputs=[{"name": "between"}]))
    assert list(named) == ["between"]
    assert stack.http.get("/admin/v1/models/merged/versions/1").json()["graph"]["merge"]


def test_names_that_models_share_and_inputs_that_steps_share(stack: Stack, tmp_path: Path) -> None:
    """A loop has names of its own, and the MLPs the same ones."""
    stack.push("looping", models.slow(tmp_path / "looping.onnx", 3))
    steps = {
        "one": {"model": "looping", "inputs": {"x": "x"}},
        "two": {"model": "looping", "inputs": {"x": "x"}},
        "three": {"model": "looping", "inputs": {"x": "two.y"}},
    }
    graph = {"steps": steps, "outputs": {"y": "one.y", "z": "three.y"}}
    document = push_graph(stack, "diamond", {"merge": True, **graph})
    assert document["notes"][0].startswith("One model of 3 steps"), document["notes"]
    push_graph(stack, "diamond-apart", graph)
    x = np.random.default_rng(1).standard_normal((3, 128)).astype(np.float32)
    merged, apart = outputs(call(stack, "diamond", x)), outputs(call(stack, "diamond-apart", x))
    for name in ("y", "z"):
        np.testing.assert_allclose(merged[name], apart[name], rtol=1e-5, atol=1e-6)


def test_its_steps_are_pinned_and_may_be_deleted(stack: Stack, tmp_path: Path) -> None:
    pushed(stack, tmp_path, "part", 2.0)
    graph = chain("part", "triple")
    assert push_graph(stack, "follows", graph)["version"] == 1
    assert upload(stack, "follows", graph).json()["existing"], "nothing has changed"
    pushed(stack, tmp_path, "part", 5.0)
    assert np.array_equal(outputs(call(stack, "follows", X))["y"], 6 * X), "it goes on with what it was made of"
    assert push_graph(stack, "follows", graph)["version"] == 2
    assert np.array_equal(outputs(call(stack, "follows", X))["y"], 15 * X)
    assert stack.http.delete("/admin/v1/models/part").status_code == 204, "it has a copy"
    assert np.array_equal(outputs(call(stack, "follows", X))["y"], 15 * X)


def test_what_cannot_be_one_model_is_refused_or_stays_apart_with_the_reason(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(FUNCTION)
    stack.push("code", tmp_path / "service.py")
    one = {"model": "code", "inputs": {"x": "x"}}
    refused = upload(stack, "no", {"merge": True, "steps": {"a": one}, "outputs": {"y": "a.output"}})
    assert_says(refused, "merge: step 'a' (model code v1) is no ONNX model (python)")
    conditional = chain("double", "triple")
    conditional["steps"]["b"]["if"] = "max(a.y) > 0"
    assert_says(upload(stack, "no", conditional), "merge: one model has no conditions, and no lists of sources")
    old = models.scale(tmp_path / "old.onnx", 3.0, 4)
    model = onnx.load(old)
    model.opset_import[0].version = 13
    onnx.save(model, old)
    stack.push("old", old)
    document = push_graph(stack, "mixed", chain("double", "old"))
    assert document["notes"][0].startswith("Its steps stay apart: step 'b' has operators of ai.onnx 13")
    assert np.array_equal(outputs(call(stack, "mixed", X))["y"], 6 * X)


def assert_says(reply: httpx2.Response, why: str) -> None:
    assert (reply.status_code, why in reply.json()["error"]) == (400, True), reply.text


def test_a_copy_of_a_model_needs_the_right_to_write_it(stack: Stack) -> None:
    scopes = ["models:write:mine", "infer:double", "infer:triple", "models:write:double"]
    key = stack.http.post("/admin/v1/keys", json={"name": "writer", "scopes": scopes}).json()["key"]
    with httpx2.Client(base_url=stack.url, trust_env=False, timeout=60) as client:
        reply = client.post(
            "/admin/v1/models/mine/versions",
            json=chain("double", "triple"),
            headers={"Authorization": f"Bearer {key}"},
        )
    assert (reply.status_code, "models:write:triple" in reply.text) == (403, True), reply.text
