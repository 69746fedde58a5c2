"""Workers that freeze under load for longer than their leases and thaw again: no request is lost or answered
wrongly.
"""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.load import Load, constant_load
from tests.kit.metrics import Page
from tests.kit.stack import Stack, has_answer, running_stack, sigstopped
from tests.kit.wait import wait_until

LEASE_S = 1.0  # shorter, and workers that this machine lets wait use up the attempts of a batch
CALLERS = 6
FREEZES_MAX = 20
Expected = Sequence[v2.Array]


def bodies_of(inputs: Expected) -> list[tuple[bytes, dict[str, str]]]:
    return [v2.request({"x": x}, parameters=v2.PATIENT) for x in inputs]


def check_answers(load: Load, expected: Expected) -> None:
    """Every answer is a 200 with the caller's own values."""
    for answer in load.answers:
        assert answer.status == 200, answer.body
        np.testing.assert_array_equal(v2.outputs(answer.body, answer.headers)["y"], expected[answer.sent])


def processes(stack: Stack) -> dict[str, int]:
    return {name: pid for name, pid in stack.pids().items() if name.startswith("cpu-")}


def workers(stack: Stack) -> dict[int, str]:
    """Ids of the workers that the gateway believes to live, by process."""
    listed: list[dict[str, Any]] = stack.http.get("/admin/v1/workers").json()["workers"]
    return {worker["pid"]: worker["id"] for worker in listed}


def leased(stack: Stack, worker: str) -> int:
    """Batches that a worker has and has not answered."""
    return sum(
        len(stack.redis.xpending_range(key, "w", "-", "+", 100, consumername=worker))
        for key in stack.redis.scan_iter("ms:*:stream:*")
    )


@contextmanager
def frozen_with_work(stack: Stack, pid: int) -> Iterator[None]:
    """Freeze a worker that has leases, and see the gateway strike it off its list."""
    worker = workers(stack)[pid]
    for _ in range(FREEZES_MAX):
        reclaimed = stack.metrics().value("millstream_batches_reclaimed_total")
        with sigstopped(pid):
            wait_until(lambda: pid not in workers(stack), what="taken for dead")
            # between two batches it had nothing to lose
            if stack.metrics().value("millstream_batches_reclaimed_total") > reclaimed:
                assert leased(stack, worker) == 0
                yield
                return
        wait_until(lambda: pid in workers(stack))
    raise AssertionError(f"{worker} had no work when it was frozen, {FREEZES_MAX} times")


def busy(stack: Stack, names: Iterable[str]) -> list[float]:
    """How long each worker has run batches."""
    page = stack.metrics()
    return [page.value("millstream_worker_busy_seconds_total", worker=name) for name in names]


def all_grew(before: Sequence[float], now: Sequence[float]) -> bool:
    return all(a < b for a, b in zip(before, now, strict=True))


def say_counts(load: Load, before: Page, page: Page) -> None:
    """Print them, and check that the product counts as the callers do: each request is answered once."""
    statuses = [answer.status for answer in load.answers]
    names = ("batches_reclaimed_total", "duplicate_replies_total", "requests_refused_total")
    counts = {name: int(page.value(f"millstream_{name}")) for name in names}
    print(
        {"requests": len(statuses), "200": statuses.count(200), "failed": len(statuses) - statuses.count(200), **counts}
    )
    for outcome in ({"outcome": "ok"}, {}):
        name = "millstream_requests_total"
        assert page.value(name, **outcome) - before.value(name, **outcome) == len(statuses)
    assert counts["requests_refused_total"] == 0


@pytest.mark.parametrize("columns", [2, 16384], ids=["inline", "shared memory"])
def test_a_worker_that_freezes_under_load_costs_no_request(tmp_path: Path, columns: int) -> None:
    path = models.identity(tmp_path / "m.onnx", shape=("N", columns))
    expected = [np.full((1, columns), i, np.float32) for i in range(8)]
    with running_stack(tmp_path, pools="cpu=2", settings={"queue_lease_s": LEASE_S}, models={"steady": path}) as stack:
        pids = processes(stack)
        begun = stack.metrics()
        with constant_load(stack.port, "/v2/models/steady/infer", bodies_of(expected), CALLERS, pause_s=0) as load:
            load.more(50)
            for pid in pids.values():
                with frozen_with_work(stack, pid):
                    load.more(50)  # every caller got on: what it had in hand was taken over
                assert stack.settled("steady", 1)
                # the same processes: none was started anew
                wait_until(lambda: set(workers(stack)) == set(pids.values()), what="both are heard of")
                before = busy(stack, pids)
                wait_until(lambda: all_grew(before, busy(stack, pids)))  # noqa: B023
            load.more(50)
        check_answers(load, expected)
        page = stack.metrics()
        assert page.value("millstream_batches_reclaimed_total") >= len(pids)
        assert not any("was ended" in line for line in stack.lines)
        say_counts(load, begun, page)


def test_all_workers_freeze_for_a_moment(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    inputs = [np.full((1, 2), i, np.float32) for i in range(8)]
    expected = [x * np.float32(2.0) for x in inputs]
    with running_stack(tmp_path, pools="cpu=2", settings={"queue_lease_s": LEASE_S}, models={"steady": path}) as stack:
        pids = processes(stack)
        begun = stack.metrics()
        with constant_load(stack.port, "/v2/models/steady/infer", bodies_of(inputs), CALLERS, pause_s=0) as load:
            load.more(50)
            with sigstopped(*pids.values()):  # shorter than the lease
                wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= CALLERS)
            load.more(50)
            for _ in range(2):
                with sigstopped(*pids.values()):  # longer: no worker is left that could take over a batch
                    wait_until(lambda: not workers(stack))
                    answered = stack.metrics().value("millstream_requests_total")
                    wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= CALLERS)
                    assert stack.metrics().value("millstream_requests_total") == answered
                load.more(50)
                stack.settled("steady", 1)
                before = busy(stack, pids)
                wait_until(lambda: all_grew(before, busy(stack, pids)))  # noqa: B023
        check_answers(load, expected)
        wait_until(lambda: set(workers(stack)) == set(pids.values()), what="both are heard of")
        say_counts(load, begun, stack.metrics())


@pytest.mark.parametrize("running", [True, False], ids=["in a run", "before it runs"])
def test_a_thawed_worker_writes_into_nobody_elses_memory(tmp_path: Path, running: bool) -> None:
    """It runs what another has answered meanwhile, and whose place in shared memory has other tensors by then."""
    settings = {"queue_lease_s": LEASE_S}
    with running_stack(tmp_path, pools="cpu=2", settings=settings) as stack:
        path = models.slow(tmp_path / "m.onnx", rounds=4_000)
        stack.push("long", path, config='{"rows_max": 128}')
        rng = np.random.default_rng(1)
        # 128 rows lie where the input and the output of 64 rows lay; both are large enough for shared memory.
        inputs = [rng.standard_normal((rows, 128), np.float32) for rows in (128, 64)]
        bodies = bodies_of(inputs)
        expected = [_answer(stack.send("/v2/models/long/infer", *body)) for body in bodies]

        listed = workers(stack)
        with sigstopped(*(() if running else listed)):
            connection, frozen = leased_by(stack, bodies[1], listed)
            (other,) = listed.keys() - {frozen}
            thawed = [name for name, pid in processes(stack).items() if pid == frozen]
            with sigstopped(frozen):
                os.kill(other, signal.SIGCONT)
                one_row = _answer(connection)
                os.kill(other, signal.SIGSTOP)
                connection = stack.send("/v2/models/long/infer", *bodies[0])
                wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 1)
                before = busy(stack, thawed)
            wait_until(lambda: all_grew(before, busy(stack, thawed)), what="the thawed worker has run it, too")
            os.kill(other, signal.SIGCONT)
            two_rows = _answer(connection)
        page = stack.metrics()
        print(
            {name: page.value(f"millstream_{name}") for name in ("batches_reclaimed_total", "duplicate_replies_total")}
        )
        for got, right in zip((two_rows, one_row), expected, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-4)


def leased_by(
    stack: Stack, body: tuple[bytes, dict[str, str]], listed: Mapping[int, str]
) -> tuple[http.client.HTTPConnection, int]:
    """Send a request; return its connection, and the process that has leased it."""
    for _ in range(FREEZES_MAX):
        connection = stack.send("/v2/models/long/infer", *body)
        holding: list[int] = []

        def seen() -> bool:
            holding.extend(pid for pid in listed if leased(stack, listed[pid]))  # noqa: B023
            return bool(holding) or has_answer(connection)  # noqa: B023

        wait_until(seen, what="leased")
        if holding:
            return connection, holding[0]
        _answer(connection)  # before its lease was seen
    raise AssertionError("no lease was seen")


def _answer(connection: http.client.HTTPConnection) -> v2.Array:
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    assert reply.status == 200, body
    return v2.outputs(body, dict(reply.getheaders()))["y"]
