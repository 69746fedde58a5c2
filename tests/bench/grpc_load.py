"""Generates gRPC load with h2load: many calls in flight over a few connections, all with the same message.

h2load does not check gRPC's trailers, so a call of tritonclient's stub checks before that calls succeed.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.bench.errors import LoadError
from tests.bench.load import WARM_UP_S, Load
from tests.bench.processes import cpu_s
from tests.bench.servers import Server

CONNECTIONS = 8
#: a gateway closes connections at their maximum age and h2load does not reconnect, so measurements are shorter
SECONDS_MAX = 5
METHOD = "/inference.GRPCInferenceService/ModelInfer"
Metadata = tuple[tuple[str, str], ...]


def require_h2load() -> None:
    """Raise LoadError if h2load is not installed."""
    if shutil.which("h2load") is None:
        raise LoadError("h2load is not installed: apt-get install nghttp2-client")


def message(model: str, name: str, row: np.ndarray) -> pb.ModelInferRequest:
    """Return a request for one row, with raw contents."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[row.astype("<f4").tobytes()])
    request.inputs.add(name=name, datatype="FP32", shape=[1, *row.shape])
    return request


def measure(
    server: Server,
    folder: Path,
    request: pb.ModelInferRequest,
    calls: int,
    seconds: int,
    *,
    connections: int = CONNECTIONS,
    metadata: Metadata = (),
) -> Load:
    """Keep `calls` calls in flight for `seconds` after a second of warm-up. Raises LoadError."""
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, metadata=metadata, timeout=10)
        except grpc.RpcError as error:
            raise LoadError(f"{server.grpc} does not answer: {error}") from error
    body = request.SerializeToString()
    path = folder / "message.bin"
    path.write_bytes(struct.pack(">BI", 0, len(body)) + body)
    _h2load(server, path, calls, WARM_UP_S, connections, metadata)
    log = folder / "h2load.log"
    log.unlink(missing_ok=True)  # h2load appends
    before = cpu_s(server.pid)
    output = _h2load(server, path, calls, min(seconds, SECONDS_MAX), connections, metadata, log)
    spent = cpu_s(server.pid) - before
    latencies_us = np.loadtxt(log, usecols=2, ndmin=1)
    done = int(_match(r"(\d+) succeeded", output))
    if done != int(_match(r"requests: (\d+) total", output)) or not done:
        raise LoadError(f"{server.grpc} did not answer every call: {output}")
    return Load(
        rate=done / min(seconds, SECONDS_MAX),
        p50_us=float(np.percentile(latencies_us, 50)),
        p99_us=float(np.percentile(latencies_us, 99)),
        cpu_us=spent / done * 1e6,
    )


def _h2load(
    server: Server,
    path: Path,
    calls: int,
    seconds: int,
    connections: int,
    metadata: Metadata,
    log: Path | None = None,
) -> str:
    """Return its output. `log`: gets a line for each call, of which the third column is the latency in microseconds."""
    command = ["h2load", "-t1", f"-c{connections}", f"-m{calls // connections}", f"-D{seconds}", "-d", str(path)]
    command += [f"--log-file={log}"] if log else []
    fields = (("content-type", "application/grpc"), ("te", "trailers"), *metadata)
    headers = [word for name, value in fields for word in ("-H", f"{name}: {value}")]
    url = f"http://{server.grpc}{METHOD}"
    done = subprocess.run([*command, *headers, url], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"h2load failed on {url}: {' '.join(done.stderr.split())}")
    return done.stdout


def _match(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise LoadError(f"unexpected output of h2load: {text}")
    return found[1]
