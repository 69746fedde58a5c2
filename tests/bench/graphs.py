"""Measures graphs of two steps: beside calls of one of their models, and beside the runs of their models alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from tests.bench import servers
from tests.bench.errors import LoadError
from tests.bench.load import Load, Payload, json_payload, measure
from tests.bench.result import Figure, Result
from tests.bench.rounds import Say, Turn, measured, medians, ratio, turns_of
from tests.bench.servers import ROOT
from tests.kit import models

ONE, MANY = 1, 64  # connections
CALLS = 2  # of models, which the graph is in place of
_COLUMNS = 64
_LONG_COLUMNS = 128  # of models.slow
_LONG_ROUNDS = 800  # some milliseconds
_GRAPH = """
steps:
  first: {model: double, inputs: {x: x}}
  second: {model: triple, inputs: {x: first.y}}
outputs: {y: second.y}
"""
_LONG_GRAPH = _GRAPH.replace("double", "long").replace("triple", "longer")


def graph_rows(folder: Path, rounds: int, seconds: int, say: Say) -> Result:
    """Measure graphs of two models of one operator, and of two that take milliseconds."""
    short, long = _short(folder, rounds, seconds, say), _long(folder, rounds, seconds, say)
    return Result((*short.figures, *long.figures), (*short.loads, *long.loads))


def _short(folder: Path, rounds: int, seconds: int, say: Say) -> Result:
    """Measure a row of 64 floats through two models of one operator, as a graph and by calls of each."""
    payload = json_payload(folder, "x", np.round(np.random.default_rng(5).standard_normal(_COLUMNS), 4))
    graph = folder / "graph.yaml"
    graph.write_text(_GRAPH)
    served = {
        "double": models.scale(folder / "double.onnx", 2.0, _COLUMNS),
        "triple": models.scale(folder / "triple.onnx", 3.0, _COLUMNS),
        "graph": graph,
        "merged": folder / "merged.yaml",
    }
    served["merged"].write_text(f"merge: true\n{_GRAPH}")
    with servers.millstream(folder, "graphs", served) as server:
        turns = [
            Turn(name, number, partial(_measured, server, names, payload, number, seconds))
            for number, calls in ((ONE, ["double"]), (MANY, ["double", "triple"]))
            for name, names in (("calls", calls), ("a graph of two steps", ["graph"]), ("merged", ["merged"]))
        ]
        found = turns_of(turns, rounds, say)
    one, both, merged, one_of_many, both_of_many, merged_of_many = found
    return Result(
        (
            _figure("a graph of two steps, median latency at 1 connection", both, one, "p50_us"),
            _figure("a graph of two steps, CPU per request at 64 connections", both_of_many, one_of_many, "cpu_us"),
            _figure("the same merged, median latency at 1 connection", merged, one, "p50_us"),
            _figure("the same merged, CPU per request at 64 connections", merged_of_many, one_of_many, "cpu_us"),
        ),
        measured(turns, found),
    )


def _measured(server: servers.Server, names: Sequence[str], payload: Payload, connections: int, seconds: int) -> Load:
    """Return a load on several models at once, each with its share of the connections."""
    with ThreadPoolExecutor() as pool:
        share = connections // len(names)
        found = list(pool.map(lambda name: measure(server, f"/v2/models/{name}/infer", payload, share, seconds), names))
    # Each has the processor time of all for its own requests alone.
    cpu_us = 1 / sum(1 / max(load.cpu_us, 1) for load in found)
    return replace(medians(found), rate=sum(load.rate for load in found), cpu_us=cpu_us)


def _figure(name: str, graph: Sequence[Load], model: Sequence[Load], what: str) -> Figure:
    detail = f"{getattr(medians(graph), what):.0f} us, one call {getattr(medians(model), what):.0f} us"
    found = ratio(graph, model, lambda load: float(getattr(load, what))) / CALLS
    return Figure(name, found, 1.0, "x two calls'", detail, at_most=True)


def _long(folder: Path, rounds: int, seconds: int, say: Say) -> Result:
    """Measure two models of some milliseconds as a graph, with one worker and with two, and the sum of their runs.

    A hop is what a call of a model takes that hardly runs.
    """
    served = {
        "long": models.slow(folder / "long.onnx", _LONG_ROUNDS),
        "longer": models.slow(folder / "longer.onnx", _LONG_ROUNDS + 1),
    }
    payload = json_payload(folder, "x", np.round(np.random.default_rng(5).standard_normal(_LONG_COLUMNS), 4))
    graph, hop = folder / "long.yaml", models.scale(folder / "hop.onnx", 2.0, _LONG_COLUMNS)
    graph.write_text(_LONG_GRAPH)
    loaded = {**served, "hop": hop, "graph": graph}
    preload = [word for name, path in loaded.items() for word in ("--preload", f"{name}={path}")]
    runs: list[float] = []
    hops: list[Load] = []
    found: dict[int, list[Load]] = {1: [], 2: []}
    with (
        servers.millstream_up(folder, "one-worker", preload) as one,
        servers.millstream_up(folder, "two-workers", preload, workers=2) as two,
    ):
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}: two models of milliseconds: alone, as a graph")
            runs.append(sum(1e6 / _raw_rate(path, seconds) for path in served.values()))
            hops.append(measure(one, "/v2/models/hop/infer", payload, 1, seconds))
            for workers, server in ((1, one), (2, two)):
                found[workers].append(measure(server, "/v2/models/graph/infer", payload, 1, seconds))
    run_us, hop_us = median(runs), medians(hops).p50_us
    graph_us, spread_us = medians(found[1]).p50_us, medians(found[2]).p50_us
    figures = (
        Figure(
            "a graph of two models of milliseconds, one worker",
            median(load.p50_us / run for load, run in zip(found[1], runs, strict=True)),
            1.15,
            "x their runs alone",
            f"{graph_us / 1000:.2f} ms, both runs {run_us / 1000:.2f} ms",
            at_most=True,
        ),
        Figure(
            "the same over two workers",
            median((load.p50_us - run) / hop.p50_us for load, run, hop in zip(found[2], runs, hops, strict=True)),
            CALLS,
            "hops more than their runs",
            f"{spread_us / 1000:.2f} ms, a hop {hop_us:.0f} us",
            at_most=True,
        ),
    )
    return Result(figures, ())


def _raw_rate(path: Path, seconds: int) -> float:
    command = [sys.executable, "-m", "tests.bench.raw_loop", str(path), str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"the raw ONNX Runtime loop failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout)
