"""Measures a model beside another one whose runs never end: its 99th percentile, quiet and beside.

two workers, one hot model ─> quiet ─> callers keep endless runs of another model in flight ─> beside ─> Endless
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import numpy as np

from tests.bench import servers
from tests.bench.errors import LoadError
from tests.bench.load import Payload, json_payload
from tests.bench.open_loop import Arrivals, send
from tests.bench.servers import Server
from tests.kit import models

RATE = 50.0
SECONDS = 20.0
WARM_S = 3.0
ANSWER_S_MAX = 60.0
CALLERS = 12  # of the endless model; more than its workers and what they may have in flight
WORKERS = 2
ON = 7  # the element that lets a run go on for ever
REFUSED_PAUSE_S = 0.2


class Endless(NamedTuple):
    """The measurements: 99th percentiles of the hot model in ms, and how many endless calls were sent."""

    quiet_p99_ms: float
    beside_p99_ms: float
    calls: int

    @property
    def slowdown(self) -> float:
        return self.beside_p99_ms / self.quiet_p99_ms


def _p99_ms(server: Server, payload: Payload, seconds: float = SECONDS) -> float:
    """Return the 99th percentile of the hot model. Raises LoadError."""
    arrivals = Arrivals("/v2/models/hot/infer", payload, RATE, seconds)
    send(server.url, arrivals)
    failed = [answer.status for answer in arrivals.answers if answer.status != 200]
    if failed:
        raise LoadError(f"{len(failed)} requests beside endless runs failed, the first with {failed[0]}")
    return 1000 * float(np.quantile([answer.seconds for answer in arrivals.answers], 0.99))


@contextmanager
def _endless_calls(server: Server, numbers: Iterator[int]) -> Iterator[None]:
    """Keep CALLERS calls in flight until the end of the block. Each is another request: equal ones are refused."""
    over = threading.Event()

    def call() -> None:
        while not over.is_set():
            data = {"inputs": [{"name": "x", "shape": [2, 1], "datatype": "INT64", "data": [ON, next(numbers) + ON]}]}
            request = Request(f"{server.url}/v2/models/endless/infer", json.dumps(data).encode(), method="POST")
            with suppress(OSError), urlopen(request, timeout=ANSWER_S_MAX):
                pass
            over.wait(REFUSED_PAUSE_S)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    yield
    over.set()


def measure_endless(folder: Path) -> Endless:
    """Call a hot model, alone and beside endless runs of another one. Raises LoadError, StartError."""
    payload = json_payload(folder, "input", np.random.default_rng(8).standard_normal(64).astype(np.float32))
    served = {"hot": models.mlp(folder / "hot.onnx"), "endless": models.endless(folder / "endless.onnx", on=ON)}
    preload = [word for name, path in served.items() for word in ("--preload", f"{name}={path}")]
    numbers = itertools.count(1)
    with servers.millstream_up(folder, "endless", preload, workers=WORKERS) as server:
        _p99_ms(server, payload, WARM_S)
        quiet_ms = _p99_ms(server, payload)
        with _endless_calls(server, numbers):
            beside_ms = _p99_ms(server, payload)
    return Endless(quiet_ms, beside_ms, next(numbers) - 1)
