"""Requests that run in parts, while workers die, callers go, versions are replaced and others want to be answered."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

ROWS = 1500  # some seconds of runs
X = np.random.default_rng(1).standard_normal((ROWS, 128)).astype(np.float32)
OTHER_X = -2 * X
ASSERTED = json.dumps({"batching": True})


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("parts")
    with running_stack(folder, pools="cpu=2", settings={"live_check_one_in": 1_000_000}) as stack:
        stack.push("slow", models.slow(folder / "slow.onnx"))
        stack.push("fragile", models.fragile(folder / "fragile.onnx"))
        stack.push("widening", models.widening(folder / "widening.onnx"), config=ASSERTED)
        yield stack


@pytest.fixture
def stack(one: Stack) -> Iterator[Stack]:
    yield one
    assert_quiet(one)


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def ask(stack: Stack, model: str, x: np.ndarray[Any, Any], version: int | None = None, **parameters: Any) -> Any:
    """Return the outputs of a request, or its reply if it failed."""
    body, headers = v2.request({"x": x}, parameters=v2.PATIENT | parameters)
    where = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
    reply = stack.http.post(f"{where}/infer", content=body, headers=headers)
    return v2.outputs(reply.content, reply.headers)["y"] if reply.status_code == 200 else reply


def alone(stack: Stack, model: str, x: np.ndarray[Any, Any], version: int | None = None) -> np.ndarray[Any, Any]:
    """Return the answers to requests of 64 rows."""
    return np.concatenate([ask(stack, model, x[at : at + 64], version) for at in range(0, len(x), 64)])


def rows_run(stack: Stack, model: str) -> int:
    """Return the rows of all runs, of answered requests and others."""
    versions = stack.http.get(f"/v2/models/{model}/stats").json()["model_stats"]
    return sum(runs["batch_size"] * runs["compute_infer"]["count"] for one in versions for runs in one["batch_stats"])


def amid(stack: Stack, model: str, callers: ThreadPoolExecutor, x: np.ndarray[Any, Any]) -> Future[Any]:
    """Begin a request, and return it when some of its parts have run."""
    before = rows_run(stack, model)
    asked = callers.submit(ask, stack, model, x)
    wait_until(lambda: rows_run(stack, model) >= before + 192, what="some parts have run")
    assert not asked.done()
    return asked


def same(found: Any, expected: np.ndarray[Any, Any]) -> bool:
    assert not isinstance(found, httpx2.Response), found.text
    return found.shape == expected.shape and np.allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_a_worker_that_dies_costs_no_row(stack: Stack, callers: ThreadPoolExecutor) -> None:
    expected = alone(stack, "slow", X)
    asked = amid(stack, "slow", callers, X)
    os.kill(stack.pids()["cpu-0"], signal.SIGKILL)
    assert same(asked.result(), expected)
    stack.settled("slow", 1)
    stack.settled("fragile", 1)
    stack.settled("widening", 1)


def test_all_parts_are_answered_by_one_version(stack: Stack, callers: ThreadPoolExecutor, tmp_path: Path) -> None:
    stack.push("replaced", models.slow(tmp_path / "one.onnx", rounds=2001))
    expected = alone(stack, "replaced", X)
    asked = amid(stack, "replaced", callers, X)
    stack.push("replaced", models.slow(tmp_path / "two.onnx", rounds=2002))
    assert same(asked.result(), expected)
    assert not same(ask(stack, "replaced", X[:64]), expected[:64])
    asked = amid(stack, "replaced", callers, X)
    assert stack.http.post("/v2/repository/models/replaced/unload").status_code == 200
    assert same(asked.result(), alone_of(tmp_path / "two.onnx"))


def alone_of(path: Path) -> np.ndarray[Any, Any]:
    """Return what a version that is no longer there answers."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found: np.ndarray[Any, Any] = session.run(None, {"x": X})[0]
    return found


def test_small_requests_are_answered_amid_large_ones(stack: Stack, callers: ThreadPoolExecutor) -> None:
    small_alone = ask(stack, "slow", X[:1])
    large = [callers.submit(ask, stack, "slow", x) for x in (X, OTHER_X)]
    wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 2)
    between = 0
    while not any(one.done() for one in large):
        assert same(ask(stack, "slow", X[:1]), small_alone)
        between += 1
    assert between >= 5
    for one, x in zip(large, (X, OTHER_X), strict=True):
        assert same(one.result(), alone(stack, "slow", x))


def test_a_caller_that_goes_leaves_no_work(stack: Stack) -> None:
    before, body = rows_run(stack, "slow"), v2.request({"x": np.tile(X, (4, 1))})
    connection = stack.send("/v2/models/slow/infer", *body)
    wait_until(lambda: rows_run(stack, "slow") >= before + 192, what="some parts have run")
    connection.close()
    wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") == 0)
    assert_quiet(stack)
    assert rows_run(stack, "slow") < before + 4 * ROWS


def test_the_deadline_is_that_of_the_whole(stack: Stack) -> None:
    before, began = rows_run(stack, "slow"), time.monotonic()
    reply = ask(stack, "slow", np.tile(X, (4, 1)), timeout=1_000_000)
    assert (reply.status_code, time.monotonic() - began >= 0.9) == (504, True), reply.text
    assert_quiet(stack)
    assert rows_run(stack, "slow") < before + 4 * ROWS


def test_a_row_on_which_the_model_fails_fails_the_request(stack: Stack) -> None:
    x = np.full((1000, 1), 2, np.int64)
    assert np.array_equal(ask(stack, "fragile", x), np.full((1000, 1), -(2**62)))
    x[700] = 0
    reply = ask(stack, "fragile", x)
    error = reply.json()["error"]
    first, last = map(int, re.match(r"in rows (\d+) to (\d+): ", error).groups())  # type: ignore[union-attr]
    assert (reply.status_code, first <= 700 <= last, "\n" in error) == (500, True, False), error


def test_outputs_of_other_dimensions_cannot_be_joined(stack: Stack) -> None:
    x = np.arange(1000, 2000, dtype=np.float32).reshape(-1, 1)
    assert same(ask(stack, "widening", x), x)
    x[700] = 777
    reply = ask(stack, "widening", x)
    assert (reply.status_code, "output 'y' has the shape" in reply.json()["error"]) == (400, True), reply.text
    assert same(ask(stack, "widening", x[690:750]), np.tile(x[690:750], (1, 2)))
