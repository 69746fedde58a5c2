"""Generates gRPC load with grpcio: threads that share one channel, which behaves as h2load does not.

grpc-core gives window, pings and reconnects by rules of its own, so that limits of a server may stop it alone.
In a process of its own: python -m tests.bench.grpc_clients ADDRESS MESSAGE THREADS SECONDS
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.bench.errors import LoadError
from tests.bench.grpc_load import METHOD
from tests.bench.load import Load
from tests.bench.processes import cpu_s
from tests.bench.servers import ROOT, Server

WAIT_S = 20.0


class Called(NamedTuple):
    """A measurement, and how many of its calls failed."""

    load: Load
    failed: int


def measure(server: Server, folder: Path, request: pb.ModelInferRequest, threads: int, seconds: int) -> Called:
    """Call from `threads` threads over one channel for `seconds`. Raises LoadError if no call succeeds."""
    path = folder / "call.bin"
    path.write_bytes(request.SerializeToString())
    before = cpu_s(server.pid)
    command = [sys.executable, "-m", __name__, server.grpc, str(path), str(threads), str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    spent = cpu_s(server.pid) - before
    if done.returncode:
        raise LoadError(f"grpcio failed on {server.grpc}: {' '.join(done.stderr.split())[-500:]}")
    found = json.loads(done.stdout)
    load = Load(
        rate=found["answered"] / seconds,
        p50_us=found["p50_us"],
        p99_us=found["p99_us"],
        cpu_us=spent / found["answered"] * 1e6,
    )
    return Called(load, found["failed"])


def _called(address: str, message: bytes, threads: int, seconds: float) -> dict[str, float]:
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)  # bytes in, bytes out
        call(message, timeout=WAIT_S)
        until = time.perf_counter() + seconds

        def calls(_: int) -> tuple[list[float], int]:
            latencies_s, failed = [], 0
            while (began := time.perf_counter()) < until:
                try:
                    call(message, timeout=WAIT_S)
                except grpc.RpcError:
                    failed += 1
                else:
                    latencies_s.append(time.perf_counter() - began)
            return latencies_s, failed

        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(calls, range(threads)))
    latencies_us = np.concatenate([part for part, _ in parts]) * 1e6
    p50_us, p99_us = np.percentile(latencies_us, [50, 99])
    failed = sum(number for _, number in parts)
    return {"answered": len(latencies_us), "failed": failed, "p50_us": float(p50_us), "p99_us": float(p99_us)}


if __name__ == "__main__":
    _address, _path, _threads, _seconds = sys.argv[1:]
    print(json.dumps(_called(_address, Path(_path).read_bytes(), int(_threads), float(_seconds))))
