"""Callers of a soak: each sends requests whose answers it knows, one after the other, and counts the outcomes.

next request ─> post ─> right | refused (429, 503) | cut (its gateway was killed) | failed
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.kit import v2

ANSWER_S_MAX = 60.0
REFUSED_S = 0.05  # pause after a refusal; shorter than Retry-After, since the soak needs load


class Question:
    """A request and a check of its outputs."""

    def __init__(self, model: str, inputs: dict[str, Any], right: Callable[[dict[str, Any]], bool]) -> None:
        self.path = f"/v2/models/{model}/infer"
        self.body, self.headers = v2.request(inputs)
        self.right = right


def questions() -> list[Question]:
    """Return requests with small and large rows, with one row and with several."""
    rng = np.random.default_rng(1)
    result: list[Question] = []
    for rows in (1, 1, 1, 2, 7):
        x = rng.standard_normal((rows, 2)).astype(np.float32)
        result.append(Question("steady", {"x": x}, partial(_scaled, x, (2.0,))))
        # Any of the versions that were ever active may answer, but one of them for all rows.
        result.append(Question("rolled", {"x": x}, partial(_scaled, x, (2.0, 3.0))))
    large = rng.standard_normal((1, 16384)).astype(np.float32)
    result.append(Question("large", {"x": large}, partial(_scaled, large, (1.0,))))
    return result


def _scaled(x: Any, factors: tuple[float, ...], outputs: dict[str, Any]) -> bool:
    return any(np.array_equal(outputs["y"], x * np.float32(factor)) for factor in factors)


class Callers:
    """Sends requests from `number` threads until `stop`.

    Attributes:
        counts: outcomes by kind.
        failures: descriptions of wrong answers and lost connections, at most 20.
    """

    def __init__(self, port: int, number: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.slowest_s = 0.0
        self.gateway_died = float("-inf")  # when a gateway was last killed (monotonic): its connections are cut
        self._port = port
        self._questions = questions()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(seed + i,)) for i in range(number)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _call(self, seed: int) -> None:
        choose = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S_MAX)
        while not self._stopping.is_set():
            question = choose.choice(self._questions)
            began = time.monotonic()
            try:
                connection.request("POST", question.path, question.body, question.headers)
                reply = connection.getresponse()
                kind, failure = self._judge(question, reply.status, dict(reply.getheaders()), reply.read())
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                cut = began - 5 < self.gateway_died
                kind, failure = ("cut", "") if cut else ("failed", f"{question.path}: {error!r}")
            self._count(kind, failure, time.monotonic() - began)
            if kind == "refused":
                self._stopping.wait(REFUSED_S)
        connection.close()

    @staticmethod
    def _judge(question: Question, status: int, headers: dict[str, str], body: bytes) -> tuple[str, str]:
        """Return the kind of outcome, and a description if it is a failure."""
        if status == 200:
            right = question.right(v2.outputs(body, headers))
            return ("right", "") if right else ("failed", f"{question.path}: wrong values")
        lower = {name.lower() for name in headers}
        if status in (429, 503) and "retry-after" in lower:
            return "refused", ""
        return "failed", f"{question.path}: {status} {body[:200]!r}"

    def _count(self, kind: str, failure: str, seconds: float) -> None:
        with self._lock:
            self.counts[kind] += 1
            self.slowest_s = max(self.slowest_s, seconds)
            if failure and len(self.failures) < 20:
                self.failures.append(failure)
