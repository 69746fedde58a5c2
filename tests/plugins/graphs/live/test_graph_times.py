"""How long the steps of a graph wait and run: in the answer, on its page, in metrics; cold steps load early."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import models
from tests.kit.command_line import Millstream
from tests.kit.graphs import call, outputs, push_graph
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

X = np.arange(8, dtype=np.float32).reshape(2, 4)
#: asks `large` only where `small` answers less than 10
CASCADE = """
steps:
  small: {model: double, inputs: {x: x}, version: 1}
  large: {model: negative, inputs: {x: x}, version: 1, if: max(small.y) < 10}
outputs: {y: [large.y, small.y]}
"""
OUTER = """
steps:
  before: {model: double, inputs: {x: x}}
  cascade: {model: cascade, inputs: {x: before.y}}
outputs: {y: cascade.y}
"""
OLD, NEWEST = 1, 3


def furnish(stack: Stack, folder: Path) -> None:
    """Push graphs of versions that serve nothing else, so that they are on standby after a start."""
    for name, factor in (("double", 2.0), ("negative", -1.0)):
        for _ in range(NEWEST):
            factor += 0.25
            stack.push(name, models.scale(folder / f"{name}.onnx", factor - 0.25, 4))
    push_graph(stack, "cascade", CASCADE)
    push_graph(stack, "outer", OUTER)


def state(stack: Stack, name: str) -> str:
    return str(stack.http.get(f"/admin/v1/models/{name}/versions/{OLD}").json()["state"])


def timing(reply: Any) -> dict[str, float]:
    (value,) = reply.headers.get_list("server-timing")
    found = dict(re.findall(r"([\w.]+);dur=([\d.]+)", value))
    assert ", ".join(f"{name};dur={text}" for name, text in found.items()) == value
    return {name: float(text) for name, text in found.items()}


def measured(stack: Stack, model: str) -> dict[str, Any]:
    steps = stack.http.get(f"/admin/v1/models/{model}").json()["versions"][0]["steps"]
    return {one["step"]: one["measured"] for one in steps}


def test_the_times_of_steps(tmp_path: Path) -> None:
    with running_stack(tmp_path / "home") as stack:
        furnish(stack, tmp_path)
    with running_stack(tmp_path / "home", settings={"server_timing": True}) as stack:
        wait_until(lambda: state(stack, "negative") == "standby", what="old versions are not loaded")
        assert measured(stack, "cascade") == {"small": None, "large": None}
        began = time.monotonic()
        reply = call(stack, "cascade", X)
        assert np.array_equal(outputs(reply)["y"], 2 * X)
        found = timing(reply)
        assert set(found) == {"total", "small.queue", "small.run"}
        assert found["small.queue"] + found["small.run"] <= found["total"] < (time.monotonic() - began) * 1000
        wait_until(lambda: state(stack, "negative") == "ready", what="a step that did not run was loaded all the same")
        reply = call(stack, "outer", X - 100)
        assert np.allclose(outputs(reply)["y"], (X - 100) * 2.5 * -1)
        names = ("before", "cascade.small", "cascade.large")
        assert set(timing(reply)) == {"total", *(f"{name}.{part}" for name in names for part in ("queue", "run"))}
        steps = measured(stack, "cascade")
        assert (steps["small"]["answered"], steps["large"]["answered"], steps["large"]["skipped"]) == (2, 1, 1)
        for step in steps.values():
            assert 0 < step["run_s"] < step["queue_s"] + step["run_s"] < 60
            assert 0 < step["p50_s"] <= step["p99_s"]
        page = stack.metrics()
        labels = {"model": "cascade", "version": "1", "step": "large"}
        assert page.value("millstream_step_requests_total", **labels, outcome="skipped") == 1
        run_s = page.value("millstream_step_run_seconds_total", **labels)
        assert run_s == pytest.approx(steps["large"]["run_s"], rel=1e-2)
        described = Millstream(stack.home).ok("describe", "cascade")
        assert "large: negative v1 (x = x) if max(small.y) < 10" in described
        assert "1 answered" in described and "1 skipped" in described


def test_steps_are_measured_although_nothing_else_asks_for_times(tmp_path: Path) -> None:
    with running_stack(tmp_path / "home") as stack:
        stack.push("double", models.scale(tmp_path / "double.onnx", 2.0, 4))
        stack.push("failing", models.failing(tmp_path / "failing.onnx"))
        push_graph(stack, "one", "steps:\n  a: {model: double, inputs: {x: x}}\noutputs: {y: a.y}\n")
        push_graph(stack, "wrong", "steps:\n  a: {model: failing, inputs: {index: index}}\noutputs: {y: a.y}\n")
        reply = call(stack, "one", X)
        assert "server-timing" not in reply.headers
        assert measured(stack, "one")["a"]["run_s"] > 0
        assert call(stack, "wrong", np.array([[99]]), tensor="index").status_code == 500
        assert measured(stack, "wrong")["a"]["failed"] == {"model": 1}
