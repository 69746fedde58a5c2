"""Outputs above a limit: their caller gets an error, once, and no other caller notices. On a real stack."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

MIB = 1 << 20
REPLY_BYTES_MAX = 4 * MIB
COLUMNS = MIB // 4  # of the model `spread`: 1 MiB for each row
FORCED = json.dumps({"batching": True})
REFUSED = "millstream_replies_refused_total"


@pytest.fixture(scope="module", params=["shared memory", "redis"])
def one_stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {
        "reply_bytes_max": REPLY_BYTES_MAX,
        "shm_bytes_max": 64 * MIB if request.param == "shared memory" else 0,
        "queue_lease_s": 120,
    }
    folder = tmp_path_factory.mktemp("large")
    with running_stack(folder, settings=settings) as stack:
        stack.push("spread", models.spread(folder / "spread.onnx", COLUMNS), config=FORCED)
        stack.push("blank", models.blank(folder / "blank.onnx"), config='{"batching": false}')
        stack.push("words", models.identity(folder / "words.onnx", "BYTES", ("N", 1)), config=FORCED)
        yield stack


@pytest.fixture
def stack(one_stack: Stack) -> Iterator[Stack]:
    yield one_stack
    assert_quiet(one_stack)


def send(stack: Stack, model: str, **inputs: v2.Array) -> http.client.HTTPConnection:
    return stack.send(f"/v2/models/{model}/infer", *v2.request(inputs))


def answer(connection: http.client.HTTPConnection) -> tuple[int, v2.Array | str]:
    """Status, and the output or the error."""
    reply = connection.getresponse()
    body, headers = reply.read(), dict(reply.getheaders())
    connection.close()
    if reply.status != 200:
        return reply.status, str(json.loads(body)["error"])
    [output] = v2.outputs(body, headers).values()
    return 200, output


def rows(*values: float) -> v2.Array:
    return np.array(values, np.float32).reshape(-1, 1)


def spread(*values: float) -> v2.Array:
    return np.repeat(rows(*values), COLUMNS, axis=1)


def test_only_the_caller_whose_outputs_are_too_large_is_told_so(stack: Stack) -> None:
    worker = stack.pids()["cpu-0"]
    before = stack.metrics().value(REFUSED, reason="too_large")
    with sigstopped(worker):
        # one batch when the worker wakes up, whose outputs are too large together, too
        small = [send(stack, "spread", x=rows(number, -number)) for number in range(1, 4)]
        large = send(stack, "spread", x=rows(*range(5)))
        last = send(stack, "spread", x=rows(9))
        wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 5)
    status, error = answer(large)
    assert status == 413
    assert f"{5 * MIB} bytes" in error
    assert "MILLSTREAM_REPLY_BYTES_MAX" in error
    for number, connection in enumerate(small, 1):
        status, output = answer(connection)
        assert status == 200, output
        np.testing.assert_array_equal(output, spread(number, -number))
    status, output = answer(last)
    assert status == 200
    np.testing.assert_array_equal(output, spread(9))
    assert stack.pids()["cpu-0"] == worker
    wait_until(lambda: stack.metrics().value(REFUSED, reason="too_large") - before == 1)


def test_outputs_as_large_as_the_caller_says(stack: Stack) -> None:
    worker = stack.pids()["cpu-0"]
    fits = REPLY_BYTES_MAX // 4
    status, output = answer(send(stack, "blank", count=np.array([fits], np.int64)))
    assert (status, np.shape(output)) == (200, (fits,))
    status, error = answer(send(stack, "blank", count=np.array([fits + 1], np.int64)))
    assert status == 413, error
    status, output = answer(send(stack, "blank", count=np.array([0], np.int64)))
    assert (status, np.shape(output)) == (200, (0,))
    assert stack.pids()["cpu-0"] == worker


def test_texts_count_as_what_they_are_long(stack: Stack) -> None:
    long = np.array([[b"x" * (REPLY_BYTES_MAX - 4)]], object)
    status, output = answer(send(stack, "words", x=long))
    assert status == 200, output
    status, error = answer(send(stack, "words", x=np.array([[long[0, 0] + b"x"]], object)))
    assert status == 413, error


def test_outputs_that_redis_refuses_are_an_error_and_the_next_ones_an_answer(tmp_path: Path) -> None:
    settings = {"shm_bytes_max": 0, "queue_lease_s": 120}
    path = models.blank(tmp_path / "blank.onnx")
    with running_stack(tmp_path, settings=settings) as stack:
        stack.push("blank", path, config='{"batching": false}')
        worker = stack.pids()["cpu-0"]
        used = int(stack.redis.info("memory")["used_memory"])
        stack.redis.config_set("maxmemory", used + 8 * MIB)
        status, error = answer(send(stack, "blank", count=np.array([16 * MIB], np.int64)))
        assert status == 503, error
        assert "OOM" in str(error)
        status, output = answer(send(stack, "blank", count=np.array([MIB], np.int64)))
        assert (status, np.shape(output)) == (200, (MIB,))
        # requests, too
        stack.redis.config_set("maxmemory", int(stack.redis.info("memory")["used_memory"]) + 2 * MIB)
        stack.push("words", models.identity(tmp_path / "words.onnx", "BYTES", ("N", 1)), config=FORCED)
        status, error = answer(send(stack, "words", x=np.array([[b"x" * 32 * MIB]], object)))
        assert status == 503, error
        stack.redis.config_set("maxmemory", 0)
        status, _ = answer(send(stack, "words", x=np.array([[b"x" * 32 * MIB]], object)))
        assert status == 200
        assert stack.pids()["cpu-0"] == worker
        wait_until(lambda: stack.metrics().value(REFUSED, reason="redis") == 1)


def test_the_lowest_limits_of_a_server_let_large_tensors_pass(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", "FP32", ("N", MIB))
    with running_stack(tmp_path, models={"m": path}, settings={"shm_bytes_max": 0, "queue_lease_s": 120}) as stack:
        stack.redis.config_set("proto-max-bulk-len", MIB)
        stack.redis.config_set("client-query-buffer-limit", MIB)
        x = np.random.default_rng(1).random((8, MIB), np.float32)
        status, output = answer(send(stack, "m", x=x))
        assert status == 200, output
        np.testing.assert_array_equal(output, x)
        assert stack.metrics().value("millstream_redis_reconnects_total") == 0
