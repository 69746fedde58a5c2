"""Measures a graph of two steps beside one of its models alone, which a caller would call twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tests.bench import servers
from tests.bench.load import Load, json_payload, measure
from tests.bench.result import Figure, Result
from tests.bench.rounds import Say, Turn, measured, medians, ratio, turns_of
from tests.kit import models

CONNECTIONS = (1, 64)
CALLS = 2  # of models, which the graph is in place of
_COLUMNS = 64
_GRAPH = """
steps:
  first: {model: double, inputs: {x: x}}
  second: {model: triple, inputs: {x: first.y}}
outputs: {y: second.y}
"""


def graph_rows(folder: Path, rounds: int, seconds: int, say: Say) -> Result:
    """Measure a row of 64 floats through two models of one operator, and through one of them."""
    payload = json_payload(folder, "x", np.round(np.random.default_rng(5).standard_normal(_COLUMNS), 4))
    graph = folder / "graph.yaml"
    graph.write_text(_GRAPH)
    served = {
        "double": models.scale(folder / "double.onnx", 2.0, _COLUMNS),
        "triple": models.scale(folder / "triple.onnx", 3.0, _COLUMNS),
        "graph": graph,
    }
    with servers.millstream(folder, "graphs", served) as server:
        turns = [
            Turn(name, number, partial(measure, server, f"/v2/models/{model}/infer", payload, number, seconds))
            for number in CONNECTIONS
            for name, model in (("one model", "double"), ("a graph of two steps", "graph"))
        ]
        found = turns_of(turns, rounds, say)
    one, both, one_of_many, both_of_many = found
    return Result(
        (
            _figure("a graph of two steps, median latency at 1 connection", both, one, "p50_us"),
            _figure("a graph of two steps, CPU per request at 64 connections", both_of_many, one_of_many, "cpu_us"),
        ),
        measured(turns, found),
    )


def _figure(name: str, graph: Sequence[Load], model: Sequence[Load], what: str) -> Figure:
    detail = f"{getattr(medians(graph), what):.0f} us, one call {getattr(medians(model), what):.0f} us"
    found = ratio(graph, model, lambda load: float(getattr(load, what))) / CALLS
    return Figure(name, found, 1.0, "x two calls'", detail, at_most=True)
