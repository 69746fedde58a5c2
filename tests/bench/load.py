"""Generates HTTP load with wrk: many connections with one request in flight each, all with the same body.

Payload ─> wrk -s post.lua ─> Load: rate, latency, and the CPU that the server's processes spent on each request
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.bench.errors import LoadError
from tests.bench.processes import cpu_s
from tests.bench.servers import Server

SCRIPT = Path(__file__).with_name("post.lua")
WARM_UP_S = 1


@dataclass(frozen=True)
class Payload:
    """A request body in a file, and its headers."""

    path: Path
    headers: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """One measurement: replies per second, latency, and the CPU time of all server processes per request."""

    rate: float
    p50_us: float
    p99_us: float
    cpu_us: float


def json_payload(folder: Path, name: str, row: np.ndarray) -> Payload:
    """Return a v2 request for one row, in JSON."""
    tensor = {"name": name, "shape": [1, *row.shape], "datatype": "FP32", "data": row.ravel().tolist()}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"inputs": [tensor]}))
    return Payload(path, ("Content-Type: application/json",))


def binary_payload(folder: Path, name: str, row: np.ndarray) -> Payload:
    """Return a v2 request for one row, with binary inputs and outputs."""
    raw = row.astype("<f4").tobytes()
    parameters = {"binary_data_size": len(raw)}
    tensor = {"name": name, "shape": [1, *row.shape], "datatype": "FP32", "parameters": parameters}
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [tensor]}).encode()
    path = folder / f"{name}.bin"
    path.write_bytes(head + raw)
    length = f"Inference-Header-Content-Length: {len(head)}"
    return Payload(path, ("Content-Type: application/octet-stream", length))


def require_wrk() -> None:
    """Raise LoadError if wrk is not installed."""
    if shutil.which("wrk") is None:
        raise LoadError("wrk is not installed: apt-get install wrk")


def _wrk(url: str, payload: Payload, connections: int, seconds: int, cores: set[int] | None) -> dict[str, int]:
    pinned = ["taskset", "-c", ",".join(map(str, sorted(cores)))] if cores else []
    command = [*pinned, "wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(SCRIPT), url]
    done = subprocess.run(
        [*command, "--", str(payload.path), *payload.headers], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LoadError(f"wrk failed on {url}: {' '.join((done.stderr or done.stdout).split())}")
    figures: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    if figures["errors"] or figures["status_errors"] or not figures["requests"]:
        raise LoadError(f"{url} did not answer every request of {payload.path.name}: {figures}")
    return figures


def measure(
    server: Server,
    path: str,
    payload: Payload,
    connections: int,
    seconds: int,
    cores: set[int] | None = None,
) -> Load:
    """Put load on `server` for `seconds` after a second of warm-up and return the measurement. Raises LoadError.

    `cores` are the cores that wrk runs on.
    """
    url = server.url + path
    _wrk(url, payload, connections, WARM_UP_S, cores)
    before = cpu_s(server.pid)
    figures = _wrk(url, payload, connections, seconds, cores)
    spent = cpu_s(server.pid) - before
    return Load(
        rate=figures["requests"] / figures["duration_us"] * 1e6,
        p50_us=figures["p50_us"],
        p99_us=figures["p99_us"],
        cpu_us=spent / figures["requests"] * 1e6,
    )
