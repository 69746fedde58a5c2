"""Kills the worker of a version's preferred pool under load: how long callers wait for the other one, and what fails.

a steady rate ─> the preferred pool ─(SIGKILL)─> the other pool ─(restarted, loaded)─> the preferred pool, … ─> Overflow
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import numpy as np

from tests.bench import servers
from tests.bench.errors import LoadError
from tests.bench.load import json_payload
from tests.bench.open_loop import Answer, Arrivals, send
from tests.bench.processes import PROC, WORKER, running_module
from tests.bench.servers import ADMIN, Server
from tests.kit import models

KILLS = 5
RATE = 200.0
ROUND_S = 8.0
KILL_AFTER_S = 2.0
READY_S_MAX = 60.0
PREFERRED = "cpu"  # comes before the other pool by its name

Say = Callable[[str], None]


class Overflow(NamedTuple):
    """The measurements: for each kill the longest wait of a request, and the failed requests of all."""

    waits_s: Sequence[float]
    requests: int
    failed: int


def _worker(server: Server) -> int:
    for pid in running_module(server.pid, WORKER):
        words = (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
        if PREFERRED in words:
            return pid
    raise LoadError(f"pool {PREFERRED} has no worker")


def _wait_ready(server: Server, pools: int) -> None:
    """Wait until so many pools have the model ready."""
    until = time.monotonic() + READY_S_MAX
    while time.monotonic() < until:
        with urlopen(Request(f"{server.url}/admin/v1/models/m/versions/1", headers=ADMIN)) as reply:
            instances = json.load(reply)["instances"]
        if sum(instance["state"] == "ready" for instance in instances) == pools:
            return
        time.sleep(0.05)
    raise LoadError(f"the model is not ready in {pools} pools")


def measure_overflow(folder: Path, say: Say) -> Overflow:
    """Kill the preferred pool's only worker several times under load. Raises LoadError or StartError."""
    payload = json_payload(folder, "input", np.random.default_rng(8).standard_normal(64).astype(np.float32))
    waits: list[float] = []
    answers: list[Answer] = []
    arguments = ["--pool", "other=1", "--preload", f"m={models.mlp(folder / 'overflow.onnx')}"]
    with servers.millstream_up(folder, "overflow", arguments) as server:
        for number in range(KILLS):
            _wait_ready(server, 2)
            say(f"overflow: kill {number + 1} of {KILLS}")
            arrivals = Arrivals("/v2/models/m/infer", payload, RATE, ROUND_S)
            timer = threading.Timer(KILL_AFTER_S, os.kill, (_worker(server), signal.SIGKILL))
            timer.start()
            send(server.url, arrivals)
            timer.join()
            answers += arrivals.answers
            waits.append(max(answer.seconds for answer in arrivals.answers))
    return Overflow(waits, len(answers), sum(answer.status != 200 for answer in answers))
