"""More is asked of a model than it can do: it answers what it can in time and refuses the rest at once; others do not
feel it.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.stack import Stack, running_stack

CALLERS = 7
ROUNDS = 10_000  # of matrix products: some ten milliseconds a row
WAIT_S = 120.0
REFUSALS = {429, 503}
BREATH_S = 0.005
PATIENCES_RUNS = (3, 6, 12)  # what a caller waits for, in runs: less than what the others ahead of it take
FLOOD_S_MAX = 90.0  # beyond it, runs have become slower than before the flood: callers wait longer
LATE_S_MAX = 100.0  # on the way to a caller of a machine that has much to do
GREW_BYTES_MAX = 100 << 20
ANSWERED_MIN = 100
REFUSED_MIN = 200
OTHERS_MIN = 100


class Timed(NamedTuple):
    """An answer, and the seconds from the moment it was asked for."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


class Flood:
    """Callers that ask again when they are answered, whatever the answer is; each has a connection of its own.

    A refusal is followed by a breath: what is to be flooded is the model, not the cores that it shares with the
    callers.
    """

    def __init__(self, port: int, path: str, body: bytes, headers: dict[str, str], callers: int) -> None:
        self.answers: list[Timed] = []
        self._port = port
        self._request = ("POST", path, body, headers)
        self._moved = threading.Condition()
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._call, name=f"flood {i}") for i in range(callers)]

    def statuses(self) -> Counter[int]:
        return Counter(answer.status for answer in self.answers.copy())

    def reaches(self, status: int, answers: int) -> bool:
        """Wait for a number of answers of a status; return whether they came within FLOOD_S_MAX."""
        with self._moved:
            held = self._moved.wait_for(lambda: self._errors or self.statuses()[status] >= answers, FLOOD_S_MAX)
        self.check()
        return bool(held)

    def check(self) -> None:
        if self._errors:
            raise AssertionError(f"a caller got no answer: {self._errors[0]!r}") from self._errors[0]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _call(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                connection.request(*self._request)
                reply = connection.getresponse()
                body = reply.read()
                answer = Timed(reply.status, dict(reply.getheaders()), body, time.monotonic() - began)
                with self._moved:
                    self.answers.append(answer)
                    self._moved.notify_all()
                if answer.status in REFUSALS:
                    self._stopping.wait(BREATH_S)
        except BaseException as error:
            with self._moved:
                self._errors.append(error)
                self._moved.notify_all()
        finally:
            connection.close()


@contextmanager
def flood(port: int, model: str, body: bytes, headers: dict[str, str], callers: int) -> Iterator[Flood]:
    found = Flood(port, f"/v2/models/{model}/infer", body, headers, callers)
    found.start()
    try:
        yield found
    finally:
        found.stop()
    found.check()


def ask(stack: Stack, model: str, body: bytes, headers: dict[str, str]) -> Timed:
    """One request, when no other caller sends."""
    began = time.monotonic()
    reply = stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    return Timed(reply.status_code, dict(reply.headers), reply.content, time.monotonic() - began)


def resident_bytes(stack: Stack) -> int:
    """Memory of the gateway."""
    status = Path(f"/proc/{stack.pids()['gateway-0']}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


def ms(seconds: list[float], share: float) -> float:
    return round(1000 * sorted(seconds)[int(share * (len(seconds) - 1))], 1)


def check_flood(answers: list[Timed], timeout_s: float, expected: v2.Array) -> list[float]:
    """Every answer is one of those that are promised, in its time; how long the refusals took."""
    refusals: list[float] = []
    for answer in answers:
        assert answer.status in {200, 504, *REFUSALS}, answer
        if answer.status == 200:
            assert answer.seconds < timeout_s + LATE_S_MAX
            got = v2.outputs(answer.body, answer.headers)["y"]
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
        elif answer.status == 504:
            assert answer.seconds < timeout_s + LATE_S_MAX  # sooner, once it was clear that it would be late
        else:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            assert int(headers["retry-after"]) >= 1
            refusals.append(answer.seconds)
    return refusals


@pytest.mark.parametrize("why", ["deadlines", "a full lane"])
def test_a_flood_is_answered_or_refused_in_time_and_nobody_else_feels_it(tmp_path: Path, why: str) -> None:
    rows_waiting_max = 8192 if why == "deadlines" else 2
    with running_stack(tmp_path, settings={"queue_rows_max": rows_waiting_max}) as stack:
        stack.push("slow", models.slow(tmp_path / "slow.onnx", rounds=ROUNDS), config='{"rows_max": 1}')
        stack.push("small", models.scale(tmp_path / "small.onnx"))
        x = np.random.default_rng(1).standard_normal((1, 128), np.float32)
        body, headers = v2.request({"x": x})
        alone = [ask(stack, "slow", body, headers) for _ in range(5)]
        assert {answer.status for answer in alone} == {200}
        expected = v2.outputs(alone[0].body, alone[0].headers)["y"]
        run_s = median(answer.seconds for answer in alone)
        small = v2.request({"x": np.array([[1, 2]], np.float32)}, parameters=v2.PATIENT)
        before_bytes = resident_bytes(stack)

        for patience_runs in PATIENCES_RUNS:
            timeout_s = patience_runs * run_s if why == "deadlines" else WAIT_S / 2
            body, headers = v2.request({"x": x}, parameters={"timeout": round(timeout_s * 1e6)})
            began = time.monotonic()
            with (
                flood(stack.port, "slow", body, headers, CALLERS) as slow,
                flood(stack.port, "small", *small, 1) as others,
            ):
                flooded = slow.reaches(200, ANSWERED_MIN) and slow.reaches(429, REFUSED_MIN)
                assert others.reaches(200, OTHERS_MIN), others.statuses()
                grew_bytes = resident_bytes(stack) - before_bytes
            flood_s = time.monotonic() - began
            if flooded:
                break
        assert flooded, slow.statuses()
        after = ask(stack, "slow", *v2.request({"x": x}, parameters=v2.PATIENT))

        refusals = check_flood(slow.answers, timeout_s, expected)
        seconds = [answer.seconds for answer in others.answers]
        run_ms, statuses = round(1000 * run_s, 1), slow.statuses()
        print({"slow": dict(statuses), "goodput": round(statuses[200] * run_s / flood_s, 2), "run_ms": run_ms})
        print({"refusals_ms": {"p50": ms(refusals, 0.5), "p99": ms(refusals, 0.99)}})
        print({"small": dict(others.statuses()), "p50_ms": ms(seconds, 0.5), "p99_ms": ms(seconds, 0.99)})
        print({"after_ms": round(1000 * after.seconds, 1), "grew_mib": round(grew_bytes / (1 << 20), 1)})
        answered = [answer.seconds for answer in slow.answers if answer.status == 200]
        assert median(refusals) < median(answered)  # at once: no refusal waits for a run
        for answer in others.answers:
            assert answer.status == 200, answer
            got = v2.outputs(answer.body, answer.headers)["y"]
            np.testing.assert_array_equal(got, np.array([[2, 4]], np.float32))
        assert after.status == 200, after
        assert after.seconds < 10 * run_s + LATE_S_MAX
        assert grew_bytes < GREW_BYTES_MAX
        assert resident_bytes(stack) - before_bytes < GREW_BYTES_MAX
