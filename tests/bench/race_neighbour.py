"""Measures what a race costs another model of the same worker: its 99th percentile.

quiet: latency of a hot model ─> a race of SqueezeNet beside it, until its verdict ─> quiet again ─> Neighbour
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np

from tests.bench import servers
from tests.bench.errors import LoadError
from tests.bench.load import Payload, json_payload
from tests.bench.open_loop import Arrivals, send
from tests.bench.servers import ADMIN, Server
from tests.kit import models

RATE = 100.0
SLICE_S = 5.0
QUIET_SLICES = 6  # before the race, and again after it
LATE_S = 1200.0  # for which a race may last
_VERSION = "/admin/v1/models/raced/versions/1"
_GOES_ON = frozenset({"queued", "running"})


class Neighbour(NamedTuple):
    """The measurements.

    Args:
        quiet_p99_ms: of the hot model before and after the race.
        beside_p99_ms: of the hot model during the race, from all of its requests.
        seconds: how long the race took.
        candidates: how many candidates it measured.
    """

    quiet_p99_ms: float
    beside_p99_ms: float
    seconds: float
    candidates: int

    @property
    def slowdown(self) -> float:
        return self.beside_p99_ms / self.quiet_p99_ms


def _call(server: Server, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
    request = Request(f"{server.url}{path}", body or None, {"Content-Type": "application/json", **ADMIN}, method=method)
    try:
        with urlopen(request) as reply:
            found: dict[str, Any] = json.load(reply)
    except OSError as error:
        raise LoadError(f"{path}: {error}") from error
    return found


def _slice(server: Server, payload: Payload) -> list[float]:
    """Return the latencies of one slice, in ms. Raises LoadError."""
    arrivals = Arrivals("/v2/models/hot/infer", payload, RATE, SLICE_S)
    send(server.url, arrivals)
    failed = [answer.status for answer in arrivals.answers if answer.status != 200]
    if failed:
        raise LoadError(f"{len(failed)} requests beside a race failed, the first with {failed[0]}")
    return [1000 * answer.seconds for answer in arrivals.answers]


def _quiet(server: Server, payload: Payload) -> list[float]:
    return [ms for _ in range(QUIET_SLICES) for ms in _slice(server, payload)]


def measure_neighbour(folder: Path) -> Neighbour:
    """Race SqueezeNet beside a hot model of the same worker. Raises LoadError, StartError."""
    payload = json_payload(folder, "input", np.random.default_rng(8).standard_normal(64).astype(np.float32))
    served = {"hot": models.mlp(folder / "hot.onnx"), "raced": models.squeezenet(folder / "raced.onnx")}
    asked = {"accept_random_samples": True}
    with servers.millstream(folder, "race", served) as server:
        _slice(server, payload)
        quiet, beside = _quiet(server, payload), []
        _call(server, "POST", f"{_VERSION}/race", json.dumps(asked).encode())
        until = time.monotonic() + LATE_S
        while (race := _call(server, "GET", f"{_VERSION}/race"))["state"] in _GOES_ON:
            if time.monotonic() > until:
                raise LoadError(f"the race did not end within {LATE_S:.0f} s: {race['state']}")
            beside += _slice(server, payload)
        if race["state"] != "decided":
            raise LoadError(f"the race ended as {race['state']}: {race['why']}")
        quiet += _quiet(server, payload)
    return Neighbour(
        float(np.quantile(quiet, 0.99)),
        float(np.quantile(beside, 0.99)),
        race["report"]["seconds"],
        sum(row["ratio"] is not None for row in race["rows"]),
    )
