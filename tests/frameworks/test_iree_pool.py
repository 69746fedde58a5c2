"""A pool of the backend iree in a running product: functions of JAX, compiled at each load, without a race."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from tests.kit import jax_models, v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

ROWS = (1, 3, 8, 20)  # 20: more than the largest number of rows that is compiled


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("iree")
    with running_stack(folder, pools="iree=1,backend=iree") as stack:
        content = jax_models.mlp(folder / "mlp.jax").read_bytes()
        path, config = "/admin/v1/models/mlp/versions", {"config": '{"batching": true}', "wait": "1"}
        reply = stack.http.post(path, params=config, content=content, timeout=300)
        assert reply.status_code in {201, 202}, reply.text
        # The check tries the function with XLA, and the load compiles it: minutes on a busy machine.
        wait_until(lambda: stack.http.get(f"{path}/1").json().get("state") == "ready", 400, what="it is ready")
        yield stack


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 8)).astype(np.float32)


def instances(stack: Stack) -> list[str]:
    """Return the states of the model's instances."""
    document = stack.http.get("/admin/v1/models/mlp/versions/1").json()
    return [one["state"] for one in document["instances"]]


def test_a_function_answers_as_numpy_does_for_each_number_of_rows(stack: Stack) -> None:
    assert instances(stack) == ["ready"]
    for count in ROWS:
        body, headers = v2.request({"x": rows_of(count)})
        reply = stack.http.post("/v2/models/mlp/infer", content=body, headers=headers)
        assert reply.status_code == 200, reply.text
        found = v2.outputs(reply.content, dict(reply.headers))["output_0"]
        np.testing.assert_allclose(found, jax_models.mlp_answers(rows_of(count)), rtol=1e-4, atol=1e-6)


def test_concurrent_requests_are_answered(stack: Stack) -> None:
    bodies = [v2.request({"x": rows_of(count)}) for count in ROWS[:3]]
    with constant_load(stack.port, "/v2/models/mlp/infer", bodies, callers=4) as load:
        load.more(40)
    for answer in load.answers:
        assert answer.status == 200, answer.body
        found = v2.outputs(answer.body, dict(answer.headers))["output_0"]
        np.testing.assert_allclose(found, jax_models.mlp_answers(rows_of(ROWS[answer.sent])), rtol=1e-4, atol=1e-6)


def test_a_worker_that_was_killed_compiles_again(stack: Stack) -> None:
    worker = stack.pids()["iree-0"]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: stack.pids().get("iree-0", worker) != worker)
    wait_until(lambda: instances(stack) == ["ready"], 400, what="it is compiled again")
    test_a_function_answers_as_numpy_does_for_each_number_of_rows(stack)
