"""Overloads a model with five times its capacity: measures what is answered in time, and the effect on a neighbour.

quiet: capacity of the model, latency of a neighbour ─> storm: both at once ─> 5 s later: both again ─> Figures
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote
from urllib.request import Request, urlopen

import numpy as np

from tests.bench import servers
from tests.bench.load import Payload, json_payload, measure
from tests.bench.open_loop import Answer, Arrivals, send
from tests.bench.processes import GATEWAY, memory, running_module
from tests.bench.servers import ADMIN, Server
from tests.kit import models

LOAD_FACTOR = 5.0  # of the capacity
STORM_S = 30.0
QUIET_S = 10.0
CALM_S = 5.0  # after this time a storm must have no effect
CONNECTIONS = 32  # enough to fill all batches
CALM_RATE = 5.0
ROUNDS = 10_000  # matrix products: a run takes some tens of milliseconds, so the load generator needs little CPU time
ROWS_MAX = 4
PATIENCE_RUNS = 5.0  # timeout of callers in the storm, in durations of a run with ROWS_MAX rows

Say = Callable[[str], None]


class Storm(NamedTuple):
    """The measurements. Rates are 1/s; `timeout_ms` is the timeout of the callers in the storm."""

    capacity: float
    good: float
    refused: float
    expired: float
    timeout_ms: float
    refusal_p99_ms: float
    quiet_p50_ms: float
    after_p50_ms: float
    grew_mb: float
    neighbour_quiet_p99_ms: float
    neighbour_p99_ms: float


def _with_timeout(payload: Payload, folder: Path, timeout_s: float) -> Payload:
    document = json.loads(payload.path.read_bytes())
    document["parameters"] = {"timeout": round(timeout_s * 1e6)}
    path = folder / "impatient.json"
    path.write_text(json.dumps(document))
    return Payload(path, payload.headers)


def _full_run_s(server: Server) -> float:
    """Return the seconds of a run of the flooded model with its largest number of rows."""
    with urlopen(Request(f"{server.url}/admin/v1/models/flooded", headers=ADMIN)) as reply:
        document = json.load(reply)
    return float(max(document["versions"][0]["instances"][0]["profile"].values()))


def _ms(answers: Sequence[Answer], share: float) -> float:
    return 1000 * float(np.quantile([answer.seconds for answer in answers], share)) if answers else 0.0


class _Bench:
    def __init__(self, server: Server, folder: Path, payload: Payload, say: Say) -> None:
        self._server, self._payload, self._say = server, payload, say
        self._capacity = measure(server, _infer("flooded"), payload, CONNECTIONS, int(QUIET_S / 2)).rate
        self._timeout_s = PATIENCE_RUNS * _full_run_s(server)
        self._impatient = _with_timeout(payload, folder, self._timeout_s)

    def _calm(self, model: str, seconds: float) -> list[Answer]:
        arrivals = Arrivals(_infer(model), self._payload, CALM_RATE, seconds)
        send(self._server.url, arrivals)
        return arrivals.answers

    def _storm(self, seconds: float) -> Arrivals:
        return Arrivals(_infer("flooded"), self._impatient, LOAD_FACTOR * self._capacity, seconds)

    def run(self) -> Storm:
        self._say("storm: before")
        quiet = self._calm("flooded", QUIET_S)
        (gateway,) = running_module(self._server.pid, GATEWAY)
        before = memory(gateway).rss_bytes
        self._say(f"storm: {STORM_S:.0f} s of overload")
        storm = self._storm(STORM_S)
        send(self._server.url, storm)
        grew = memory(gateway).rss_bytes - before
        self._say("storm: after")
        time.sleep(CALM_S)
        after = self._calm("flooded", QUIET_S)
        self._say("storm: the neighbour")
        neighbour_quiet = self._calm("neighbour", STORM_S)
        beside = Arrivals(_infer("neighbour"), self._payload, CALM_RATE, STORM_S)
        send(self._server.url, self._storm(STORM_S), beside)
        good = [answer for answer in storm.answers if answer.status == 200 and answer.seconds <= self._timeout_s]
        refused = [answer for answer in storm.answers if answer.status in (429, 503)]
        return Storm(
            capacity=self._capacity,
            good=len(good) / STORM_S,
            refused=len(refused) / STORM_S,
            expired=(len(storm.answers) - len(refused) - len(good)) / STORM_S,
            timeout_ms=1000 * self._timeout_s,
            refusal_p99_ms=_ms(refused, 0.99),
            quiet_p50_ms=_ms(quiet, 0.5),
            after_p50_ms=_ms(after, 0.5),
            grew_mb=grew / 2**20,
            neighbour_quiet_p99_ms=_ms(neighbour_quiet, 0.99),
            neighbour_p99_ms=_ms(beside.answers, 0.99),
        )


def _upload(server: Server, name: str, model: bytes) -> None:
    config = quote(json.dumps({"rows_max": ROWS_MAX}))
    url = f"{server.url}/admin/v1/models/{name}/versions?wait=60&config={config}"
    with urlopen(Request(url, model, {"Content-Type": "application/octet-stream", **ADMIN}, method="POST")):
        pass


def _infer(model: str) -> str:
    return f"/v2/models/{model}/infer"


def measure_storm(folder: Path, say: Say) -> Storm:
    """Flood one of two equal models, alone and beside the other, and measure. Raises LoadError or StartError."""
    payload = json_payload(folder, "x", np.random.default_rng(7).standard_normal(128).astype(np.float32))
    model = models.slow(folder / "slow.onnx", rounds=ROUNDS).read_bytes()
    with servers.millstream(folder, "storm", {}) as server:
        for name in ("flooded", "neighbour"):
            _upload(server, name, model)
        say("storm: the capacity of the model")
        return _Bench(server, folder, payload, say).run()
