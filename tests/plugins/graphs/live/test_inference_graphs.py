"""KServe's InferenceGraph on a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import yaml

from tests.kit import models
from tests.kit.graphs import call, outputs, push_graph
from tests.kit.stack import Stack, running_stack

X = np.arange(8, dtype=np.float32).reshape(2, 4) + 1


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("kserve")
    with running_stack(folder / "home") as running:
        running.push("double", models.scale(folder / "double.onnx", 2.0, 4))
        running.push("negative", models.scale(folder / "negative.onnx", -1.0, 4))
        yield running


def push(stack: Stack, name: str, **nodes: Any) -> None:
    head = {"apiVersion": "serving.kserve.io/v1alpha1", "kind": "InferenceGraph", "metadata": {"name": name}}
    push_graph(stack, name, yaml.safe_dump({**head, "spec": {"nodes": nodes}}))


def node(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"routerType": kind, "steps": list(steps)}


def test_each_kind_of_node_routes_tensors(stack: Stack) -> None:
    last = {"serviceName": "negative", "data": "$response", "condition": "predictions.0>10"}
    push(stack, "sequence", root=node("Sequence", {"serviceName": "double"}, last))
    assert np.array_equal(outputs(call(stack, "sequence", X))["y"], 2 * X), "it ends with the first response"
    assert np.array_equal(outputs(call(stack, "sequence", 9 * X))["y"], -18 * X)
    ways = ({"serviceName": "double", "weight": 50}, {"serviceName": "negative", "weight": 50})
    push(stack, "splitter", root=node("Splitter", *ways))
    answers = [outputs(call(stack, "splitter", X))["y"][0, 0] for _ in range(40)]
    assert set(answers) == {2.0, -1.0}
    both = node("Ensemble", {"serviceName": "double"}, {"serviceName": "negative", "name": "minus"})
    switch = node(
        "Switch",
        {"serviceName": "double", "condition": "[@this].#(x==5)"},
        {"nodeName": "both", "condition": "[@this].#(x>5)"},
    )
    push(stack, "switch", root=switch, both=both)
    found = outputs(call(stack, "switch", 6 * X, outputs=[{"name": "double.y"}, {"name": "minus.y"}]))
    assert np.array_equal(found["double.y"], 12 * X)
    assert np.array_equal(found["minus.y"], -6 * X)
    assert np.array_equal(outputs(call(stack, "switch", 5 * X, outputs=[{"name": "y"}]))["y"], 10 * X)
    assert call(stack, "switch", X, outputs=[{"name": "y"}]).status_code == 400
