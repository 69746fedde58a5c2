"""Triton's perf_analyzer, as it is, against a running product: it ends well, and reports what our statistics say."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import models
from tests.kit.stack import Stack
from tests.kit.tools import CLIENTS

PROGRAM = CLIENTS / "bin" / "perf_analyzer"
CUDA = CLIENTS / f"lib/python3.{sys.version_info.minor}/site-packages/nvidia/cuda_runtime/lib"  # it links to it


def run(*arguments: str) -> str:
    assert PROGRAM.exists(), f"{PROGRAM} is missing: make .venv/.clients"
    environment = os.environ | {"LD_LIBRARY_PATH": str(CUDA)}
    done = subprocess.run(
        [PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.needs("clients", "libb64.so.0d")
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_it_measures_and_reports_the_servers_own_times(stack: Stack, tmp_path: Path, protocol: str) -> None:
    model = f"analysed-{protocol}"
    stack.push(model, models.slow(tmp_path / "m.onnx", rounds=200))  # about 1 ms
    address = stack.grpc if protocol == "grpc" else f"127.0.0.1:{stack.port}"
    table = tmp_path / "figures.csv"
    # Any figure will do: on a busy machine it would wait long for a steady one.
    said = run(
        "-m", model, "-i", protocol, "-u", address, "--measurement-interval", "500",
        "--concurrency-range", "4", "-b", "2", "--stability-percentage", "999", "-f", str(table), "--verbose-csv",
    )  # fmt: skip
    assert "Inference count: " in said
    [row] = csv.DictReader(table.read_text().splitlines())
    assert float(row["Inferences/Second"]) > 0
    figures = {
        name: int(row[f"Server {name}"]) for name in ("Queue", "Compute Input", "Compute Infer", "Compute Output")
    }
    assert figures["Compute Infer"] > 100
    assert figures["Queue"] > 0
    # Of the same unit: one long run at the end of the interval is in the averages of the server alone.
    assert sum(figures.values()) < 10 * int(row["Avg latency"])
    [found] = stack.http.get(f"/v2/models/{model}/stats").json()["model_stats"]
    success = found["inference_stats"]["success"]["count"]
    reported = int(said.split("Request count: ")[1].split()[0])
    assert success >= reported > 0
    assert found["inference_count"] == 2 * success
    assert 0 < found["execution_count"] <= success + 4  # those that it gave up at its end ran, too
