"""Measures the figures, each a ratio within one run: Millstream and its reference take turns, so that a machine that
slows down slows both.

the hot path beside C (hot_path) ── with keys, traces, TLS ── over gRPC: G, Millstream, …
── a CNN: raw loop, Millstream, … ── memory of an idle stack ─> Figures
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from tests.bench import grpc_clients, grpc_load, servers
from tests.bench.churn import measure_churn
from tests.bench.device_loop import ROWS as DEVICE_ROWS
from tests.bench.device_loop import gpu_available
from tests.bench.device_loop import measure as measure_device
from tests.bench.endless import measure_endless
from tests.bench.errors import LoadError
from tests.bench.graphs import graph_rows
from tests.bench.hot_path import hot_path
from tests.bench.images import image_rows
from tests.bench.load import Load, binary_payload, measure
from tests.bench.loads import LOADS_BACK, measure_loads
from tests.bench.many import COLD_MODELS, HOT, THOUSAND, measure_cold, measure_thousand
from tests.bench.operated import operated_rows
from tests.bench.overflow import measure_overflow
from tests.bench.processes import GATEWAY, WORKER, Memory, memory, pin, running_module
from tests.bench.result import Figure, Measured, Result
from tests.bench.rounds import Say, medians, ratio
from tests.bench.servers import ROOT
from tests.bench.storm import measure_storm
from tests.bench.texts import text_rows
from tests.bench.waiting_line import measure_waits
from tests.kit import models

MIB = 2**20
DIGITS = ROOT / "examples" / "digits" / "digits.onnx"
SQUEEZENET_CONNECTIONS = 8
SETTLE_S = 3.0
GRPC_CALLS = 64
GRPC_THREADS = 16


def grpc_rows(folder: Path, rounds: int, seconds: int, say: Say) -> Result:
    """Measure the same MLP and row over gRPC against G: 64 calls of h2load in flight, and 16 threads of grpcio."""
    row = np.random.default_rng(5).standard_normal(64).astype(np.float32)
    request = grpc_load.message("mlp", "input", row)
    served = {"mlp": models.mlp(folder / "grpc-mlp.onnx")}
    bare: list[Load] = []
    ours: list[Load] = []
    bare_threads: list[grpc_clients.Called] = []
    our_threads: list[grpc_clients.Called] = []
    with servers.grpc_ceiling(folder) as echo, servers.millstream(folder, "grpc", served) as server:
        for number in range(rounds):
            for name, target, loads, called in (
                ("G", echo, bare, bare_threads),
                ("Millstream", server, ours, our_threads),
            ):
                say(f"round {number + 1} of {rounds}: {name}, gRPC, {GRPC_CALLS} calls")
                loads.append(grpc_load.measure(target, folder, request, GRPC_CALLS, seconds))
                say(f"round {number + 1} of {rounds}: {name}, gRPC, {GRPC_THREADS} threads of grpcio")
                called.append(grpc_clients.measure(target, folder, request, GRPC_THREADS, seconds))
    by_client = {
        f"rate at {GRPC_CALLS} calls": (ours, bare),
        f"rate of {GRPC_THREADS} threads of grpcio": (
            [one.load for one in our_threads],
            [one.load for one in bare_threads],
        ),
    }
    figures = [
        Figure(
            name=f"gRPC, {name}",
            measured=ratio(mine, theirs, lambda load: load.rate),
            bound=0.8,
            unit="of G",
            detail=f"{medians(mine).rate:,.0f}/s of {medians(theirs).rate:,.0f}/s",
        )
        for name, (mine, theirs) in by_client.items()
    ]
    failed = Figure(
        name=f"gRPC, calls of {GRPC_THREADS} threads of grpcio that failed",
        measured=sum(one.failed for one in our_threads),
        bound=0,
        unit="failed",
        detail=f"in {rounds} x {seconds} s over one channel",
        at_most=True,
    )
    raw = [
        Measured(f"{server}, gRPC{client}", connections, medians(loads))
        for client, connections, (mine, theirs) in zip(
            ("", ", grpcio"), (grpc_load.CONNECTIONS, 1), by_client.values(), strict=True
        )
        for server, loads in (("G", theirs), ("Millstream", mine))
    ]
    return Result((*figures, failed), tuple(raw))


def _raw_rate(path: Path, seconds: int, core: int) -> float:
    command = ["taskset", "-c", str(core), sys.executable, "-m", "tests.bench.raw_loop", str(path), str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"the raw ONNX Runtime loop failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout)


def large_rows(folder: Path, rounds: int, seconds: int, say: Say, cores: Sequence[int]) -> Result:
    """Measure SqueezeNet with one binary image of 602 KB in each request, against ONNX Runtime alone.

    The worker and the raw loop run alone on the first core, all other processes on the second one.
    """
    device, rest = cores[0], cores[1]
    model = models.squeezenet(folder / "squeezenet.onnx")
    payload = binary_payload(folder, "data_0", np.random.default_rng(6).standard_normal((3, 224, 224)))
    raw: list[float] = []
    ours: list[Load] = []
    single: list[Load] = []
    with servers.millstream(folder, "squeezenet", {"squeezenet": model}) as server:
        pin(server.pid, {rest})
        for worker in running_module(server.pid, WORKER):
            pin(worker, {device})
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}: squeezenet, raw loop")
            raw.append(_raw_rate(model, seconds, device))
            say(f"round {number + 1} of {rounds}: squeezenet, Millstream")
            path = "/v2/models/squeezenet/infer"
            ours.append(measure(server, path, payload, SQUEEZENET_CONNECTIONS, seconds, {rest}))
            single.append(measure(server, path, payload, 1, seconds, {rest}))
    many, one = medians(ours), medians(single)
    run_us = 1e6 / median(raw)
    figures = (
        Figure(
            name="squeezenet, 602 KB binary input",
            measured=median(load.rate / alone for load, alone in zip(ours, raw, strict=True)),
            bound=0.97,
            unit="of a raw loop",
            detail=f"{many.rate:.0f}/s of {median(raw):.0f}/s",
        ),
        Figure(
            name="squeezenet at 1 connection: median latency",
            measured=median(load.p50_us * alone / 1e6 for load, alone in zip(single, raw, strict=True)),
            bound=1.2,
            unit="x a run of the raw loop",
            detail=f"{one.p50_us / 1000:.2f} ms, a run {run_us / 1000:.2f} ms",
            at_most=True,
        ),
    )
    name = "Millstream, squeezenet, binary"
    return Result(figures, (Measured(name, SQUEEZENET_CONNECTIONS, many), Measured(name, 1, one)))


def idle_memory(folder: Path, say: Say) -> Result:
    """Measure the resident memory of an idle gateway and an idle worker that serve the digits."""
    say("idle memory")
    with servers.millstream(folder, "digits", {"digits": DIGITS}) as server:
        time.sleep(SETTLE_S)
        found: dict[str, Memory] = {}
        for module in (GATEWAY, WORKER):
            found[module] = memory(running_module(server.pid, module)[0])
    wanted = (("idle memory, gateway", GATEWAY, 150), ("idle memory, worker with digits", WORKER, 200))
    return Result(
        tuple(
            Figure(
                name,
                found[module].rss_bytes / MIB,
                bound,
                "MB resident",
                f"{found[module].pss_bytes / MIB:.0f} MB proportional",
                at_most=True,
            )
            for name, module, bound in wanted
        ),
        (),
    )


def storm(folder: Path, say: Say) -> Result:
    """Measure a model under five times its capacity, alone and beside another model."""
    found = measure_storm(folder, say)
    figures = (
        Figure(
            name="in a storm: answered in time",
            measured=found.good / found.capacity,
            bound=0.9,
            unit="of the capacity",
            detail=f"{found.good:.0f}/s of {found.capacity:.0f}/s within {found.timeout_ms:.0f} ms, "
            f"{found.refused:.0f}/s refused, {found.expired:.0f}/s too late",
        ),
        Figure(
            name="in a storm: refusals, 99th percentile",
            measured=found.refusal_p99_ms,
            bound=50,
            unit="ms",
            detail=f"{found.refused:.0f}/s",
            at_most=True,
        ),
        Figure(
            name="in a storm: memory of the gateway",
            measured=found.grew_mb,
            bound=100,
            unit="MB more",
            detail="",
            at_most=True,
        ),
        Figure(
            name="5 s after a storm: median latency",
            measured=found.after_p50_ms / found.quiet_p50_ms,
            bound=1.2,
            unit="x before",
            detail=f"{found.after_p50_ms:.1f} ms, before {found.quiet_p50_ms:.1f} ms",
            at_most=True,
        ),
        Figure(
            name="beside a storm: another model's 99th percentile",
            measured=found.neighbour_p99_ms / found.neighbour_quiet_p99_ms,
            bound=2,
            unit="x its quiet value",
            detail=f"{found.neighbour_p99_ms:.1f} ms, quiet {found.neighbour_quiet_p99_ms:.1f} ms",
            at_most=True,
        ),
    )
    return Result(figures, ())


def churn(folder: Path, say: Say) -> Result:
    """Count the requests that are lost while models are replaced and workers die."""
    found = measure_churn(folder, say)
    figure = Figure(
        name="requests lost while models change and workers die",
        measured=found.calls["lost"],
        bound=0,
        unit="lost",
        detail=f"{found.calls['right']} right, {found.calls['refused']} refused, "
        f"{found.operations.total()} operations, {found.operations['kill']} of them deaths",
        at_most=True,
    )
    return Result((figure,), ())


def waiting_line(folder: Path, say: Say) -> Result:
    """Measure how long calls wait where memory is one model short."""
    found = measure_waits(folder, say)
    figures = (
        Figure(
            name="waiting line: calls refused",
            measured=found.refused,
            bound=0,
            unit="refused",
            detail=f"of {found.calls:,}, four models, memory for three",
            at_most=True,
        ),
        Figure(
            name="waiting line: mean wait",
            measured=found.wait_s / found.rules_s,
            bound=1.25,
            unit="x least recently used",
            detail=f"{found.wait_s:.2f} s, simulated rules {found.rules_s:.2f} s",
            at_most=True,
        ),
    )
    return Result(figures, ())


def endless(folder: Path, say: Say) -> Result:
    """Measure a model beside another one whose runs never end, with two workers."""
    say("a neighbour beside endless runs")
    found = measure_endless(folder)
    figure = Figure(
        name="neighbour beside endless runs",
        measured=found.slowdown,
        bound=2,
        unit="x its quiet 99th percentile",
        detail=f"{found.beside_p99_ms:.1f} ms, quiet {found.quiet_p99_ms:.1f} ms, {found.calls} endless calls",
        at_most=True,
    )
    return Result((figure,), ())


def loads(folder: Path, say: Say) -> Result:
    """Measure a hot model beside a stream of loads, and the worker's memory after many loads and unloads."""
    found = measure_loads(folder, say)
    quiet_ms, beside_ms = median(found.quiet_p99_ms), median(found.beside_p99_ms)
    figures = (
        Figure(
            name="p99 of a neighbour during loads",
            measured=found.slowdown,
            bound=1.5,
            unit="x its quiet value",
            detail=f"{beside_ms:.1f} ms, quiet {quiet_ms:.1f} ms, {found.loads} loads",
            at_most=True,
        ),
        Figure(
            name=f"memory back after {LOADS_BACK}",
            measured=found.after_mb / found.before_mb,
            bound=1.1,
            unit="x before",
            detail=f"{found.after_mb:.0f} MB, before {found.before_mb:.0f} MB",
            at_most=True,
        ),
    )
    return Result(figures, ())


def thousand(folder: Path, say: Say) -> Result:
    """Measure what a thousand models cost: to register them, for calls of some, and first calls of a model."""
    found = measure_thousand(folder, say)
    alone_us, among_us = (median(one.p50_us for one in calls) for calls in (found.alone, found.among))
    pairs = list(zip(found.alone, found.among, strict=True))
    figures = [
        Figure(
            name=f"registering {THOUSAND} models",
            measured=found.register_s,
            bound=90,
            unit="s",
            detail="from the start until all are served",
            at_most=True,
        ),
        Figure(
            name=f"hot call among {THOUSAND} models: latency",
            measured=median(among.p50_us / alone.p50_us for alone, among in pairs),
            bound=1.2,
            unit="x that of the only model",
            detail=f"{among_us:.0f} us, alone {alone_us:.0f} us, {HOT} models in turn",
            at_most=True,
        ),
        Figure(
            name=f"hot call among {THOUSAND} models: CPU",
            measured=median(among.cpu_us / alone.cpu_us for alone, among in pairs),
            bound=1.2,
            unit="x that of the only model",
            detail=f"{median(one.cpu_us for one in found.among):.0f} us, all processes",
            at_most=True,
        ),
    ]
    for kind, model in COLD_MODELS.items():
        say(f"first calls of models of {model.size}")
        cold = measure_cold(folder, kind)
        figures.append(
            Figure(
                name=f"first call of a model of {model.size}",
                measured=cold.ratio,
                bound=1.5,
                unit="x (load + run)",
                detail=f"{cold.cold_ms:.1f} ms, of which the load {cold.load_ms:.1f} ms; 90 % of the calls at "
                f"most {cold.ratio_p90:.2f} x; {cold.calls} calls, {cold.unloaded} models unloaded meanwhile",
                at_most=True,
            )
        )
    return Result(tuple(figures), ())


def overflow(folder: Path, say: Say) -> Result:
    """Measure how long callers wait for the other pool when the preferred one dies, and how many requests fail."""
    found = measure_overflow(folder, say)
    figures = (
        Figure(
            name="overflow from a dead preferred pool",
            measured=median(found.waits_s),
            bound=1.0,
            unit="s",
            detail=f"longest wait of a request, median of {len(found.waits_s)} kills; most {max(found.waits_s):.2f} s",
            at_most=True,
        ),
        Figure(
            name="requests failed meanwhile",
            measured=found.failed,
            bound=0,
            unit="requests",
            detail=f"of {found.requests}",
            at_most=True,
        ),
    )
    return Result(figures, ())


def gpu(folder: Path, seconds: int, say: Say) -> Result:
    """Measure an instance on a GPU against a bare loop on it; without a GPU there is no figure."""
    if not gpu_available():
        say("no GPU: its row is left out")
        return Result((), ())
    found = measure_device(models.squeezenet(folder / "squeezenet.onnx"), "cuda:0", seconds)
    figure = Figure(
        name=f"GPU, SqueezeNet, {DEVICE_ROWS} rows",
        measured=median(ours / bare for ours, bare in zip(found.ours, found.bare, strict=True)),
        bound=0.9,
        unit="of a raw loop",
        detail=f"{DEVICE_ROWS * median(found.ours):,.0f}/s of {DEVICE_ROWS * median(found.bare):,.0f}/s",
    )
    return Result((figure,), ())


def run(rounds: int, seconds: int, say: Say, cores: Sequence[int]) -> Result:
    """Measure everything in about `rounds` x 30 x `seconds` plus ten minutes. Raises LoadError or StartError."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as name:
        folder = Path(name)
        parts = [
            hot_path(folder, rounds, seconds, say),
            operated_rows(folder, rounds, seconds, say),
            grpc_rows(folder, rounds, seconds, say),
            graph_rows(folder, rounds, seconds, say),
            large_rows(folder, rounds, seconds, say, cores),
            image_rows(folder, rounds, seconds, say),
            text_rows(folder, rounds, say),
            storm(folder, say),
            endless(folder, say),
            loads(folder, say),
            churn(folder, say),
            waiting_line(folder, say),
            thousand(folder, say),
            overflow(folder, say),
            idle_memory(folder, say),
            gpu(folder, seconds, say),
        ]
    return Result(
        tuple(figure for part in parts for figure in part.figures),
        tuple(load for part in parts for load in part.loads),
        tuple(cost for part in parts for cost in part.costs),
    )
