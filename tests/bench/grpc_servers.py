"""Compare the two gRPC servers: calls a second and CPU of all processes, in turns, in one run.

python -m tests.bench.grpc_servers [--seconds 4] [--rounds 3]

h2load sends the load. Each server is a whole Millstream with one gateway and one worker.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from tests.bench import grpc_load
from tests.bench.load import Load
from tests.bench.servers import Server
from tests.kit import models
from tests.kit.stack import running_stack

SERVERS = ("library", "fast")
#: (connections, calls in flight)
SHAPES = ((1, 1), (8, 16), (8, 64), (64, 64))


@contextmanager
def _served(folder: Path, server: str) -> Iterator[Server]:
    """Yield a running Millstream whose gRPC server is `server`, with the model `m`."""
    folder.mkdir()
    path = models.scale(folder / "m.onnx")
    with running_stack(folder, models={"m": path}, settings={"grpc": server, "drain_s": 40}) as stack:
        yield Server(stack.url, stack.process.pid, stack.grpc)


def main() -> None:
    """Print the median of each server and shape."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.grpc_servers", description="Compare the gRPC servers.")
    parser.add_argument("--seconds", type=int, default=4, help="seconds of each measurement (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is made; the median counts (default: 3)")
    arguments = parser.parse_args()
    request = grpc_load.message("m", "x", np.ones(2, np.float32))
    loads: dict[tuple[int, int, str], list[Load]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as until:
        servers = {name: until.enter_context(_served(Path(folder, name), name)) for name in SERVERS}
        for _ in range(arguments.rounds):
            for connections, calls in SHAPES:
                for name, server in servers.items():
                    load = grpc_load.measure(
                        server, Path(folder), request, calls, arguments.seconds, connections=connections
                    )
                    loads.setdefault((connections, calls, name), []).append(load)
    for (connections, calls, name), measured in loads.items():
        rate, cpu_us = median(load.rate for load in measured), median(load.cpu_us for load in measured)
        print(f"{connections:3} connections, {calls:3} calls, {name:8}{rate:9,.0f}/s {cpu_us:7.0f} us of CPU a call")


if __name__ == "__main__":
    main()
