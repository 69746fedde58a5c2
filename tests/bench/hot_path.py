"""Measures the path of a request over REST and gRPC beside C, the least that an HTTP server of Python can cost.

one round: C and Millstream at 1, 16 and 64 connections ── gRPC ── bodies of 602 KB ─> Figures, and what a batch costs
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from tests.bench import grpc_load, servers
from tests.bench.batch_cost import PROCESSES, Cost, Stack, cost
from tests.bench.load import Load, Payload, binary_payload, json_payload, measure
from tests.bench.result import BatchCost, Figure, Result
from tests.bench.rounds import Say, Turn, measured, medians, ratio, turns_of
from tests.kit import models

CONNECTIONS = (1, 16, 64)
#: connections and calls in flight of each gRPC row
GRPC_SHAPES = ((1, 1), (8, 16), (8, 64))
LARGE_CONNECTIONS = 8
_REST = "/v2/models/{}/infer"


class _Rest:
    """Turns over REST whose cost per batch is kept."""

    def __init__(self, stack: Stack, payload: Payload, seconds: int) -> None:
        self._stack = stack
        self._payload = payload
        self._seconds = seconds
        self.costs: dict[int, list[Cost]] = {connections: [] for connections in CONNECTIONS}

    def measure(self, connections: int) -> Load:
        found = cost(self._stack, _REST.format("mlp"), self._payload, connections, self._seconds)
        self.costs[connections].append(found)
        return found.load

    def batch_costs(self) -> tuple[BatchCost, ...]:
        """Return the medians of each number of connections."""
        return tuple(
            BatchCost(
                connections,
                median(one.requests for one in found),
                {name: median(one.cpu_us[name] for one in found) for name in PROCESSES},
                median(one.calls for one in found),
            )
            for connections, found in self.costs.items()
        )


def hot_path(folder: Path, rounds: int, seconds: int, say: Say) -> Result:
    """Measure the MLP with one row of 64 floats in each request, and a model that takes 602 KB."""
    generator = np.random.default_rng(5)
    row = np.round(generator.standard_normal(64), 4).astype(np.float32)
    image = generator.standard_normal((3, 224, 224)).astype(np.float32)
    text, binary = json_payload(folder, "input", row), binary_payload(folder, "input", row)
    large = binary_payload(folder, "image", image)
    served = {"mlp": models.mlp(folder / "mlp.onnx"), "means": models.image_means(folder / "means.onnx")}
    with (
        servers.ceiling(folder) as bare,
        servers.millstream(folder, "hot", served) as ours,
    ):
        rest = _Rest(Stack("hot", ours, folder / "hot"), text, seconds)

        def calls(model: str, name: str, tensor: np.ndarray, connections: int, in_flight: int) -> Load:
            request = grpc_load.message(model, name, tensor)
            return grpc_load.measure(ours, folder, request, in_flight, seconds, connections=connections)

        def http(server: servers.Server, model: str, payload: Payload, connections: int) -> Load:
            return measure(server, _REST.format(model), payload, connections, seconds)

        turns = [
            *(Turn("C, JSON", number, partial(http, bare, "mlp", text, number)) for number in CONNECTIONS),
            *(Turn("Millstream, JSON", number, partial(rest.measure, number)) for number in CONNECTIONS),
            Turn("Millstream, binary", CONNECTIONS[-1], partial(http, ours, "mlp", binary, CONNECTIONS[-1])),
            *(
                Turn(f"Millstream, gRPC, {in_flight} calls", number, partial(calls, "mlp", "input", row, *shape))
                for shape in GRPC_SHAPES
                for number, in_flight in (shape,)
            ),
            Turn("C, 602 KB", LARGE_CONNECTIONS, partial(http, bare, "means", large, LARGE_CONNECTIONS)),
            Turn("Millstream, 602 KB", LARGE_CONNECTIONS, partial(http, ours, "means", large, LARGE_CONNECTIONS)),
            Turn(
                "Millstream, gRPC, 602 KB",
                LARGE_CONNECTIONS,
                partial(calls, "means", "image", image, LARGE_CONNECTIONS, LARGE_CONNECTIONS),
            ),
        ]
        found = turns_of(turns, rounds, say)
    return Result(hot_path_figures(found), measured(turns, found), rest.batch_costs())


def hot_path_figures(found: Sequence[Sequence[Load]]) -> tuple[Figure, ...]:
    """Return the ratios between the turns of `hot_path`, whose order `found` has."""
    c1, c16, c64, m1, m16, m64, b64, g1, g16, g64, c_large, m_large, g_large = found
    return (
        _rate("rate at 64 connections", m64, c64, 1.06, "of C"),
        _cpu("CPU per request at 64 connections, all processes", m64, c64, 1.3),
        _rate("rate at 16 connections", m16, c16, 0.72, "of C"),
        _latency("median latency at 1 connection", m1, c1, 2.0),
        _rate("binary tensors, rate at 64 connections", b64, m64, 1.1, "x JSON's"),
        _latency("gRPC beside C, median latency of 1 call", g1, c1, 2.2),
        _rate("gRPC beside C, rate at 16 calls", g16, c16, 0.6, "of C at 16 connections"),
        _rate("gRPC beside C, rate at 64 calls", g64, c64, 0.95, "of C at 64 connections"),
        _cpu("gRPC beside C, CPU per call at 64, all processes", g64, c64, 1.4),
        _rate("602 KB, rate at 8 connections", m_large, c_large, 1.35, "of C"),
        _rate("602 KB over gRPC, rate at 8 connections", g_large, c_large, 1.15, "of C"),
    )


def _rate(name: str, ours: Sequence[Load], other: Sequence[Load], bound: float, unit: str) -> Figure:
    detail = f"{medians(ours).rate:,.0f}/s of {medians(other).rate:,.0f}/s"
    return Figure(name, ratio(ours, other, lambda load: load.rate), bound, unit, detail)


def _latency(name: str, ours: Sequence[Load], bare: Sequence[Load], bound: float) -> Figure:
    detail = f"{medians(ours).p50_us:.0f} us, C {medians(bare).p50_us:.0f} us"
    return Figure(name, ratio(ours, bare, lambda load: load.p50_us), bound, "x C's", detail, at_most=True)


def _cpu(name: str, ours: Sequence[Load], bare: Sequence[Load], bound: float) -> Figure:
    detail = f"{medians(ours).cpu_us:.1f} us, C {medians(bare).cpu_us:.1f} us"
    return Figure(name, ratio(ours, bare, lambda load: load.cpu_us), bound, "x C's", detail, at_most=True)
