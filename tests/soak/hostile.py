"""Hostile models, and callers that trigger the harm: crash, run for ever, reply with gigabytes, mix up rows.

Each of their requests must be answered in time, with any outcome. `callers` counts the effects on other models.
"""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit import models, v2
from tests.kit.stack import Stack

TRIGGER = 987_654_321_987  # an element that the check of an upload never generates
ABOVE = 2.0**30  # rows are coupled from this value on, which no trial of an upload reaches
HUGE = 30_000_000  # elements of a reply: more bytes than the limit
SETTINGS = {
    "reply_bytes_max": 64 << 20,
    "check_s_max": 20,
    "worker_run_s_max": 10,
    "live_check_one_in": 10,
}
ANSWER_S_MAX = 90.0
#: statuses that a harmful request may get: its own error, a temporary refusal, or too late
ANSWERS = {"200", "413", "429", "500", "503", "504"}


@dataclass(frozen=True)
class Hostile:
    """A model, how it is uploaded, what its caller sends, and how often."""

    name: str
    build: Callable[[Path], Path]
    inputs: Callable[[random.Random], dict[str, Any]]
    every_s: float
    config: str | None = None


def _triggers(choose: random.Random) -> dict[str, Any]:
    """Return different bytes each time: a quarantine of single requests cannot stop them."""
    return {"x": np.array([[TRIGGER], [choose.getrandbits(40) + 10]], np.int64)}


HOSTILE = (
    Hostile("crashing", lambda path: models.crashing(path, on=TRIGGER), _triggers, 1.0),
    Hostile("endless", lambda path: models.endless(path, on=TRIGGER), _triggers, 5.0),
    Hostile("huge", models.blank, lambda _: {"count": np.array([HUGE], np.int64)}, 2.0),
    Hostile(
        "coupled",
        lambda path: models.coupled(path, ABOVE),
        lambda choose: {"x": np.full((1, 2), ABOVE * (1 + choose.random()), np.float32)},
        0.02,
        config='{"batching": true}',  # its rows influence each other, although its owner requests batching
    ),
)
#: models that the check must refuse each time
REFUSED = (models.crashes_on_zeros, models.endless)


class HostileCallers:
    """Sends harmful requests until `stop`.

    Attributes:
        answers: number of answers by model and status.
        failures: answers that came too late, were missing or had a status that is not allowed.
    """

    def __init__(self, stack: Stack, folder: Path, seed: int) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []
        self._stack = stack
        self._folder = folder
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(one, number, random.Random(seed + number)))
            for one in HOSTILE
            for number in range(4 if one.name == "coupled" else 1)  # several callers, so that their rows share batches
        ]

    def upload(self) -> None:
        for one in HOSTILE:
            self._stack.push(one.name, one.build(self._folder / f"{one.name}.onnx"), config=one.config)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def upload_refused(self, choose: random.Random) -> None:
        """Upload a model that would kill or block workers while they load it; it must be refused."""
        build = choose.choice(REFUSED)
        content = build(self._folder / "refused.onnx").read_bytes()
        reply = self._stack.http.put("/admin/v1/models/refused/versions/1", content=content)
        if reply.status_code not in {400, 503}:
            self.failures.append(f"upload of {build.__name__}: {reply.status_code} {reply.text[:200]}")

    def batching(self) -> str:
        """Return whether the model whose rows are coupled is still batched, and why."""
        document = self._stack.http.get("/admin/v1/models/coupled/versions/1").json()
        return f"{document['batching_decided']}: {document['batching_reason']}"

    def _call(self, one: Hostile, _: int, choose: random.Random) -> None:
        while not self._stopping.wait(one.every_s):
            body, headers = v2.request(one.inputs(choose))
            # A connection for each request: its gateway may be killed by another fault.
            connection = http.client.HTTPConnection("127.0.0.1", self._stack.port, timeout=ANSWER_S_MAX)
            try:
                connection.request("POST", f"/v2/models/{one.name}/infer", body, headers)
                reply = connection.getresponse()
                answer, text = str(reply.status), reply.read()[:200]
            except TimeoutError:
                answer, text = "no answer", b""
            except (OSError, http.client.HTTPException):
                answer, text = "cut", b""
            finally:
                connection.close()
            self.answers[one.name, answer] += 1
            if answer not in {*ANSWERS, "cut"}:
                self.failures.append(f"{one.name}: {answer} {text!r}")
