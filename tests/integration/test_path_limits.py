"""Requests that fail, wait too long, lose their caller or find no room: each is told so, and its neighbours never
notice.

A worker that is stopped holds its batches: two fill the slots, what comes after them waits in the gateway's lane.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

LANE_ROWS_MAX = 16
IN_FLIGHT_MAX = 24
TERMS = {"timeout_ms_default": 600_000}  # no request expires unless it says so


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # The lease outlasts every stop: a worker that is only stopped stays a worker.
    # Batches take the queue, where the tests count them.
    settings = {
        "queue_rows_max": LANE_ROWS_MAX,
        "inflight_requests_max": IN_FLIGHT_MAX,
        "queue_lease_s": 120,
        "queue_direct": False,
    }
    with running_stack(tmp_path_factory.mktemp("limits"), settings=settings) as stack:
        yield stack


@pytest.fixture
def stack(one_worker: Stack) -> Iterator[Stack]:
    yield one_worker
    assert_quiet(one_worker)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        text = json.loads(self.body)["error"]
        assert isinstance(text, str)
        return text


def reply(connection: http.client.HTTPConnection) -> Reply:
    got = connection.getresponse()
    found = Reply(got.status, dict(got.getheaders()), got.read())
    connection.close()
    return found


class Model:
    """A version that takes part in nothing but the test: not activated, so no readiness probe of it runs."""

    def __init__(self, stack: Stack, name: str, path: Path, **terms: object) -> None:
        self.stack = stack
        self.name = name
        stack.push(name, path, version=1, activate=False, config=json.dumps({**TERMS, **terms}))

    def send(self, array: v2.Array, name: str = "x", timeout_us: int | None = None) -> http.client.HTTPConnection:
        parameters = None if timeout_us is None else {"timeout": timeout_us}
        body, headers = v2.request({name: array}, parameters=parameters)
        return self.stack.send(f"/v2/models/{self.name}/versions/1/infer", body, headers)

    def value(self, metric: str, **labels: str) -> float:
        return self.stack.metrics().value(f"millstream_{metric}", model=self.name, **labels)

    def until(self, metric: str, value: float, **labels: str) -> None:
        wait_until(lambda: self.value(metric, **labels) == value, what=f"{metric} {labels} {value}")

    def fill_slots(self, array: v2.Array, name: str = "x") -> list[http.client.HTTPConnection]:
        """Batches of one request each in all slots of the worker, which is asleep; how many that are is the lane's
        choice.
        """
        sent: list[http.client.HTTPConnection] = []
        while self.value("lane_rows") == 0:
            sent.append(self.send(array, name))
            self._arrived(sent)
        sent.pop().close()  # it found no slot; the gateway drops it
        self.until("lane_rows", 0)
        assert sent
        return sent

    def _arrived(self, sent: list[http.client.HTTPConnection]) -> None:
        """Wait until all that was sent is in the stream or waits. A failure says what the last one was answered."""
        try:
            wait_until(lambda: self.value("stream_entries") + self.value("lane_rows") == len(sent))
        except AssertionError as error:
            counted = {name: self.value(name) for name in ("stream_entries", "lane_rows", "instances_ready")}
            answered: object = "nothing yet"
            with suppress(TimeoutError):
                sent[-1].sock.settimeout(1)
                answered = reply(sent[-1])
            raise AssertionError(f"{error}; {len(sent)} were sent, {counted}, answered: {answered}") from error


def index(*values: int) -> v2.Array:
    return np.array(values, np.int64).reshape(-1, 1)


def test_only_the_request_at_fault_gets_the_models_error(stack: Stack, tmp_path: Path) -> None:
    model = Model(stack, "lookup", models.failing(tmp_path / "m.onnx"))
    with sigstopped(stack.pids()["cpu-0"]):
        first = model.fill_slots(index(1), "index")
        rows = [index(0), index(1, 2), index(9), index(3), index(7, -8), index(4)]
        sent = [model.send(each, "index") for each in rows]
        model.until("lane_rows", 8)
    for connection in first:
        assert reply(connection).status == 200
    for each, connection in zip(rows, sent, strict=True):
        got = reply(connection)
        if each.max() > 7:
            assert got.status == 500
            assert "ONNX Runtime" in got.error
            assert "Integer division by zero" in got.error
        else:
            assert got.status == 200, got.body
            expected = np.where(each < 0, each + 8, each) * 10.0
            np.testing.assert_array_equal(v2.outputs(got.body, got.headers)["y"], expected)
    # all of them were one batch: that one failed, and its five good requests did not
    model.until("batches_total", 1, outcome="failed")
    assert model.value("batches_total", outcome="ok") == len(first)
    assert model.value("requests_total", outcome="model") == 1
    assert model.value("requests_total", outcome="ok") == len(first) + 5


def test_what_expired_is_told_so_and_never_runs(stack: Stack, tmp_path: Path) -> None:
    model = Model(stack, "expired", models.scale(tmp_path / "m.onnx"))
    x = np.ones((1, 2), np.float32)
    with sigstopped(stack.pids()["cpu-0"]):
        # The timeouts are longer than a busy machine is predicted to take, so that none is refused at once.
        leased = model.send(x, timeout_us=3_000_000)
        patient = model.send(x)
        model.until("stream_entries", 2)
        waiting = [model.send(np.ones((2, 2), np.float32), timeout_us=2_000_000) for _ in range(3)]
        for connection in (leased, *waiting):
            got = reply(connection)
            assert got.status == 504
            assert "deadline" in got.error
        model.until("lane_rows", 0)
    assert reply(patient).status == 200
    model.until("stream_entries", 0)
    model.until("batch_rows_count", 1)  # of one row: the patient caller's
    assert model.value("batch_rows_sum") == 1
    assert model.value("requests_total", outcome="expired") == 4


def test_a_caller_that_goes_away_is_dropped_from_the_lane(stack: Stack, tmp_path: Path) -> None:
    model = Model(stack, "gone", models.scale(tmp_path / "m.onnx"))
    x = np.ones((1, 2), np.float32)
    with sigstopped(stack.pids()["cpu-0"]):
        first = model.fill_slots(x)
        sent = [model.send(x) for _ in range(4)]
        model.until("lane_rows", 4)
        for connection in sent[:3]:
            connection.close()
        model.until("lane_rows", 1)
    assert {reply(connection).status for connection in (*first, sent[3])} == {200}
    model.until("batch_rows_sum", len(first) + 1)
    assert model.value("requests_total", outcome="cancelled") == 4  # one while the slots were filled


def test_a_full_lane_refuses_and_then_the_full_gateway(stack: Stack, tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    one, other = Model(stack, "full", path), Model(stack, "other", path)
    x = np.ones((1, 2), np.float32)
    before = stack.metrics()
    with sigstopped(stack.pids()["cpu-0"]):
        accepted = one.fill_slots(x)
        accepted += [one.send(x) for _ in range(LANE_ROWS_MAX)]
        one.until("lane_rows", LANE_ROWS_MAX)
        refused = reply(one.send(x))
        assert refused.status == 429
        assert "queue" in refused.error
        assert int(refused.headers["retry-after"]) >= 1

        accepted += other.fill_slots(x)
        accepted += [other.send(x) for _ in range(IN_FLIGHT_MAX - len(accepted))]
        wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") == IN_FLIGHT_MAX)
        refused = reply(other.send(x))
        assert refused.status == 503
        assert "gateway is full" in refused.error
        assert int(refused.headers["retry-after"]) >= 1
    answers = [reply(connection) for connection in accepted]
    assert [answer.body for answer in answers if answer.status != 200] == []
    after = stack.metrics()
    for reason in ("lane_full", "gateway_full"):
        name = "millstream_requests_refused_total"
        assert after.value(name, reason=reason) - before.value(name, reason=reason) == 1


def test_a_wait_that_would_outlast_the_deadline_is_refused_at_once(stack: Stack, tmp_path: Path) -> None:
    path = models.slow(tmp_path / "m.onnx", rounds=200_000)  # 0.3 s and more
    model = Model(stack, "slow", path, rows_max=1)
    x = np.ones((1, 128), np.float32)
    with sigstopped(stack.pids()["cpu-0"]):
        accepted = model.fill_slots(x)
        accepted += [model.send(x) for _ in range(10)]
        model.until("lane_rows", 10)
        refused = reply(model.send(x, timeout_us=500_000))  # the others take longer
        assert refused.status == 429
        assert "would answer in about" in refused.error
        assert int(refused.headers["retry-after"]) >= 1
    assert {reply(connection).status for connection in accepted} == {200}
    # one row each, because the version says so
    model.until("batch_rows_bucket", len(accepted), le="1.0")
    assert model.value("batch_rows_count") == len(accepted)
