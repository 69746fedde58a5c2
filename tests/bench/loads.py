"""Loads models one after the other beside a hot one: its 99th percentile, and whether unloading gives memory back.

quiet: latency of a hot model ─> a stream of loads and unloads beside it ─> quiet again, … ─> Loads
loaded and unloaded in turn, LOADS_BACK times ─> memory of the worker, before and after
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np

from tests.bench import servers
from tests.bench.errors import LoadError
from tests.bench.load import Payload, json_payload
from tests.bench.open_loop import Arrivals, send
from tests.bench.processes import WORKER, memory, running_module
from tests.bench.servers import ADMIN, Server
from tests.kit import models

RATE = 100.0
QUIET_S = 5.0
ROUNDS = 3
WEIGHTS_BYTES = 50 * 10**6
LOADS_BACK = 200
#: Loads before the memory is compared: the allocator and the library keep some for the first ones.
LOADS_FIRST = 5

Say = Callable[[str], None]


class Loads(NamedTuple):
    """The measurements.

    Args:
        quiet_p99_ms: of the hot model without loads, one for each round.
        beside_p99_ms: of the hot model during loads.
        loads: how many models were loaded meanwhile, in all rounds.
        before_mb: memory of the worker before LOADS_BACK loads and unloads.
        after_mb: the same after them.
    """

    quiet_p99_ms: Sequence[float]
    beside_p99_ms: Sequence[float]
    loads: int
    before_mb: float
    after_mb: float

    @property
    def slowdown(self) -> float:
        pairs = zip(self.beside_p99_ms, self.quiet_p99_ms, strict=True)
        return median(beside / quiet for beside, quiet in pairs)


def _post(server: Server, path: str, body: bytes = b"") -> None:
    request = Request(f"{server.url}{path}", body, {"Content-Type": "application/octet-stream", **ADMIN}, method="POST")
    try:
        with urlopen(request) as reply:
            reply.read()
    except HTTPError as error:
        raise LoadError(f"{path}: {error.status} {error.read()[:200]!r}") from error
    except URLError as error:
        raise LoadError(f"{path}: {error.reason}") from error


def _load(server: Server, name: str) -> None:
    _post(server, f"/v2/repository/models/{name}/load")


def _unload(server: Server, name: str) -> None:
    _post(server, f"/v2/repository/models/{name}/unload")


def _wait_unloaded(server: Server, name: str) -> None:
    """Wait until no worker has an instance of the model."""
    while True:
        with urlopen(Request(f"{server.url}/admin/v1/models/{name}", headers=ADMIN)) as reply:
            versions = json.load(reply)["versions"]
        if not any(version["instances"] for version in versions):
            return
        time.sleep(0.02)


class _Stream:
    """Loads and unloads models in turn until it is stopped."""

    def __init__(self, server: Server, names: Sequence[str]) -> None:
        self._server, self._names = server, names
        self._stop = threading.Event()
        self.loads = 0
        self.error: LoadError | None = None

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for name in self._names:
                    _load(self._server, name)
                    self.loads += 1
                    _unload(self._server, name)
        except LoadError as error:
            self.error = error

    @contextmanager
    def running(self) -> Iterator[None]:
        self._stop.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        if self.error is not None:
            raise self.error


def _p99_ms(server: Server, payload: Payload) -> float:
    arrivals = Arrivals("/v2/models/hot/infer", payload, RATE, QUIET_S)
    send(server.url, arrivals)
    failed = [answer.status for answer in arrivals.answers if answer.status != 200]
    if failed:
        raise LoadError(f"{len(failed)} requests beside loads failed, the first with {failed[0]}")
    return 1000 * float(np.quantile([answer.seconds for answer in arrivals.answers], 0.99))


def _worker_mb(server: Server) -> float:
    (worker,) = running_module(server.pid, WORKER)
    return memory(worker).rss_bytes / 2**20


def measure_loads(folder: Path, say: Say, loads_back: int = LOADS_BACK) -> Loads:
    """Load models beside a hot one, then many in turn, and measure. Raises LoadError or StartError."""
    payload = json_payload(folder, "input", np.random.default_rng(8).standard_normal(64).astype(np.float32))
    quiet: list[float] = []
    beside: list[float] = []
    with servers.millstream(folder, "loads", {"hot": models.mlp(folder / "hot.onnx")}) as server:
        names = ["heavy", "squeezenet"]
        _post(
            server,
            "/admin/v1/models/heavy/versions?wait=60",
            models.heavy(folder / "heavy.onnx", WEIGHTS_BYTES).read_bytes(),
        )
        _post(
            server, "/admin/v1/models/squeezenet/versions?wait=60", models.squeezenet(folder / "sq.onnx").read_bytes()
        )
        for name in names:
            _unload(server, name)
        stream = _Stream(server, names)
        _p99_ms(server, payload)
        for number in range(ROUNDS):
            say(f"loads: round {number + 1} of {ROUNDS}, quiet")
            quiet.append(_p99_ms(server, payload))
            say(f"loads: round {number + 1} of {ROUNDS}, beside loads")
            with stream.running():
                beside.append(_p99_ms(server, payload))
        before = 0.0
        for number in range(LOADS_FIRST + loads_back):
            if number == LOADS_FIRST:
                before = _worker_mb(server)
            say(f"memory: load {number + 1} of {LOADS_FIRST + loads_back}")
            _load(server, "heavy")
            _unload(server, "heavy")
            _wait_unloaded(server, "heavy")
        return Loads(quiet, beside, stream.loads, before, _worker_mb(server))
