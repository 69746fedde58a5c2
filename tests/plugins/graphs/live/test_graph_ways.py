"""Which steps of a graph run: conditions, joins, early exits; and that any graph answers what numpy does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit import models
from tests.kit.graphs import Array, call, outputs, push_graph, steps_of
from tests.kit.stack import Stack, running_stack

X = np.arange(8, dtype=np.float32).reshape(2, 4)
#: asks the large model only where the small one answers less than 10
CASCADE = """
steps:
  small: {model: double, inputs: {x: x}}
  large: {model: negative, inputs: {x: x}, if: max(small.y) < 10}
outputs:
  y: [large.y, small.y]
  certain: small.y
"""
SWITCH = """
steps:
  high: {model: double, inputs: {x: x}, if: max(x) >= 5}
  low: {model: negative, inputs: {x: x}, if: max(x) < 0}
  after: {model: double, inputs: {x: [high.y, low.y]}}
outputs:
  y: after.y
  low: low.y
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ways")
    with running_stack(folder / "home") as running:
        running.push("double", models.scale(folder / "double.onnx", 2.0, 4))
        running.push("negative", models.scale(folder / "negative.onnx", -1.0, 4))
        running.push("pair", models.add_sub(folder / "pair.onnx"))
        running.push("spread", models.variable_length(folder / "length.onnx"))
        push_graph(running, "cascade", CASCADE)
        push_graph(running, "switch", SWITCH)
        yield running


def test_a_step_runs_only_where_its_condition_holds(stack: Stack) -> None:
    before = steps_of(stack, "negative")
    found = outputs(call(stack, "cascade", X))
    assert np.array_equal(found["y"], 2 * X)
    assert steps_of(stack, "negative") == before, "max is 14: the large model is not asked"
    found = outputs(call(stack, "cascade", X - 5))
    assert np.array_equal(found["y"], 5 - X)
    assert np.array_equal(found["certain"], 2 * X - 10)
    assert steps_of(stack, "negative") == before + 1


def test_ways_are_joined_and_a_request_that_no_way_takes_is_refused(stack: Stack) -> None:
    y = [{"name": "y"}]
    assert np.array_equal(outputs(call(stack, "switch", X, outputs=y))["y"], 4 * X)
    assert np.array_equal(outputs(call(stack, "switch", X - 9, outputs=y))["y"], 18 - 2 * X)
    none = call(stack, "switch", X / 8, outputs=y)
    says = "output 'y' was not made for this request: step 'after' (model double v1) did not run"
    assert (none.status_code, none.json()["error"]) == (400, says)
    missing = call(stack, "switch", X)
    says = "output 'low' was not made for this request: step 'low' (model negative v1) did not run"
    assert (missing.status_code, missing.json()["error"]) == (400, says)


def test_a_graph_within_runs_only_what_is_needed(stack: Stack) -> None:
    inner = "steps:\n  a: {model: switch, inputs: {x: x}}\noutputs: {low: a.low, y: a.y}\n"
    push_graph(stack, "outer", inner)
    before = steps_of(stack, "double")
    assert np.array_equal(outputs(call(stack, "outer", X - 9, outputs=[{"name": "low"}]))["low"], 9 - X)
    assert steps_of(stack, "double") == before
    assert np.array_equal(outputs(call(stack, "outer", X, outputs=[{"name": "y"}]))["y"], 4 * X)


def test_a_condition_that_cannot_be_evaluated_names_its_step(stack: Stack) -> None:
    push_graph(stack, "single", "steps:\n  a: {model: double, inputs: {x: x}, if: x > 1}\noutputs: {y: a.y}\n")
    reply = call(stack, "single", X)
    says = "step 'a' (model double v1): condition: x has the shape [2, 4], not one element"
    assert reply.status_code == 500
    assert says in reply.json()["error"]


def test_a_shape_that_only_a_request_shows_names_its_step(stack: Stack) -> None:
    steps = {
        "a": {"model": "spread", "inputs": {"x": "x"}},
        "b": {"model": "double", "inputs": {"x": "a.doubled"}},
    }
    push_graph(stack, "shapes", {"steps": steps, "outputs": {"y": "b.y"}})
    assert np.array_equal(outputs(call(stack, "shapes", X))["y"], 4 * X)
    reply = call(stack, "shapes", np.ones((2, 3), np.float32))
    assert reply.status_code == 400
    assert "step 'b' (model double v1): unexpected shape for input 'x' for model 'double'" in reply.json()["error"]


def test_an_empty_tensor_between_steps(stack: Stack) -> None:
    push_graph(stack, "empty", "steps:\n  a: {model: double, inputs: {x: x}}\noutputs: {y: a.y}\nbatching: false\n")
    found = outputs(call(stack, "empty", np.empty((0, 4), np.float32)))
    assert found["y"].shape == (0, 4)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """A graph of up to eight steps that double, negate, add and subtract, some only where a condition holds."""
    steps: dict[str, Any] = {}
    made = ["x"]

    def source() -> list[str]:
        return draw(st.lists(st.sampled_from(made), min_size=1, max_size=2, unique=True))

    for number in range(draw(st.integers(1, 8))):
        name = f"s{number}"
        model = draw(st.sampled_from(["double", "negative", "pair"]))
        inputs = {"a": source(), "b": source()} if model == "pair" else {"x": source()}
        steps[name] = {"model": model, "inputs": inputs}
        if draw(st.booleans()) and draw(st.booleans()):
            above = draw(st.integers(-20, 20))
            steps[name]["if"] = f"max({draw(st.sampled_from(made))}) > {above}"
        made += [f"{name}.sum", f"{name}.difference"] if model == "pair" else [f"{name}.y"]
    return {"steps": steps, "outputs": {one.replace(".", "_"): one for one in made[1:]}}


def expected(graph: dict[str, Any], x: Array) -> dict[str, Array | None]:
    """Return what the graph's outputs are; None: it is not made."""
    found: dict[str, Array | None] = {"x": x}
    for name, step in graph["steps"].items():
        values = [next((found[one] for one in of if found[one] is not None), None) for of in step["inputs"].values()]
        holds = True
        if "if" in step:
            of, _, above = step["if"].removeprefix("max(").partition(") > ")
            read = found[of]
            holds = read is not None and bool(read.max() > int(above))
        first = values[0] if holds and all(value is not None for value in values) else None
        if step["model"] == "pair":
            second = None if first is None else values[1]
            found[f"{name}.sum"] = None if first is None or second is None else first + second
            found[f"{name}.difference"] = None if first is None or second is None else first - second
        else:
            factor = np.float32(2.0 if step["model"] == "double" else -1.0)
            found[f"{name}.y"] = None if first is None else factor * first
    return {one.replace(".", "_"): value for one, value in found.items() if one != "x"}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs(), st.integers(-10, 10))
def test_any_graph_answers_what_numpy_does(stack: Stack, graph: dict[str, Any], shift: int) -> None:
    x = X + np.float32(shift)
    wanted = expected(graph, x)
    push_graph(stack, "random", graph)
    made = {name: value for name, value in wanted.items() if value is not None}
    if made:
        found = outputs(call(stack, "random", x, outputs=[{"name": name} for name in made]))
        assert all(np.array_equal(found[name], value) for name, value in made.items())
    for name in wanted.keys() - made.keys():
        assert call(stack, "random", x, outputs=[{"name": name}]).status_code == 400
