"""What is recorded of a request of a graph: itself first, then the steps that ran for it, also of graphs within."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from millstream.gateway.observing.finished import RUNS_MAX, runs_of


def request(model: str, *steps: Any) -> Any:
    lane = SimpleNamespace(manifest=SimpleNamespace(model=model, version=1), pool="cpu")
    responder = SimpleNamespace(protocol="graph")
    return SimpleNamespace(lane=lane, responder=responder, rows=1, arrival=0.0, timing=None, steps=steps, step="s")


def test_steps_are_recorded_after_their_request() -> None:
    whole = request("graph", request("a"), request("inner", request("b")))
    assert [run.model for run in runs_of([whole, request("c")])] == ["graph", "a", "inner", "b", "c"]


def test_the_runs_of_a_call_are_bounded() -> None:
    whole = request("graph", *[request(f"s{number}") for number in range(2 * RUNS_MAX)])
    assert len(runs_of([whole, request("after")])) == RUNS_MAX
