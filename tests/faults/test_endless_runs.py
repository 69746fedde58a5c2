"""Runs that never end: a limit ends them, their callers get an answer, and all other callers keep their workers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from millstream.services.model.manifest import ModelConfig
from millstream.services.repository.folder import FolderRepository
from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.versions import publish_model
from tests.kit.wait import wait_until

ENDLESS = 7  # the element that lets a run go on for ever
PATH = "/v2/models/slow/infer"
STEADY = "/v2/models/steady/infer"
PATIENT: dict[str, object] = {"timeout": 120_000_000}  # microseconds
ROW = np.ones((1, 2), np.float32)
QUARANTINED_WITHIN_S = 30.0  # of the answer; longer than a run that was terminated may take to end
STUCK = "ended with exit code 4: restarting it at once"


def send(stack: Stack, *x: int, parameters: dict[str, object] | None = None) -> http.client.HTTPConnection:
    return stack.send(PATH, *v2.request({"x": np.array(x, np.int64).reshape(-1, 1)}, parameters=parameters))


def answer(connection: http.client.HTTPConnection) -> tuple[int, str]:
    """Status, and the error or the numbers."""
    reply = connection.getresponse()
    body, headers = reply.read(), dict(reply.getheaders())
    connection.close()
    if reply.status != 200:
        return reply.status, str(json.loads(body)["error"])
    return 200, " ".join(map(str, v2.outputs(body, headers)["y"].ravel()))


@contextmanager
def stack_with(tmp_path: Path, model: Path, timeout_ms: float, **settings: object) -> Iterator[Stack]:
    config = ModelConfig(timeout_ms_default=timeout_ms)
    publish_model(FolderRepository(tmp_path / "home" / "repository"), "slow", model, config=config)
    steady = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, pools="cpu=2", models=steady, settings=settings) as stack:
        stack.settled("slow", 1)
        yield stack


def stuck(stack: Stack) -> int:
    return sum(STUCK in line for line in stack.lines)


@pytest.mark.parametrize("make", [models.endless, models.unstoppable])
def test_two_of_them_do_not_take_a_pool_of_two_workers(tmp_path: Path, make: object) -> None:
    ends = make is models.endless
    model = (models.endless if ends else models.unstoppable)(tmp_path / "slow.onnx", on=ENDLESS)
    with stack_with(tmp_path, model, timeout_ms=3000) as stack:
        steady = v2.request({"x": ROW}, parameters=PATIENT)
        with constant_load(stack.port, STEADY, [steady], callers=1) as load:
            load.more(2)

            def quarantined() -> bool:
                """On a busy machine a deadline may pass before the run begins: then the request is sent again."""
                sent = [send(stack, ENDLESS), send(stack, ENDLESS, 1)]
                statuses = [answer(one)[0] for one in sent]
                assert set(statuses) <= {504, 500}
                with suppress(AssertionError):
                    wait_until(
                        lambda: stack.metrics().value("millstream_requests_quarantined") == 2, QUARANTINED_WITHIN_S
                    )
                    return True
                return False

            wait_until(quarantined, 300, "both are quarantined")
            load.more(5)
            # The same requests are refused before they run.
            again = [answer(send(stack, ENDLESS)), answer(send(stack, ENDLESS, 1))]
            assert {status for status, _ in again} == {500}
            assert all("took too long and had to be ended" in said for _, said in again)
            assert answer(send(stack, 5, parameters=PATIENT)) == (200, "5")  # a worker may just have started again
            load.more(5)
        assert {reply.status for reply in load.answers} == {200}
        if ends:
            assert stuck(stack) == 0
            wait_until(lambda: stack.metrics().value("millstream_runs_terminated_total", model="slow") >= 2)
        else:
            wait_until(lambda: stuck(stack) >= 2)
            stack.settled("slow", 1)


def test_those_who_shared_its_run_get_their_answers(tmp_path: Path) -> None:
    with stack_with(tmp_path, models.endless(tmp_path / "slow.onnx", on=ENDLESS), timeout_ms=20_000) as stack:
        workers = [pid for name, pid in stack.pids().items() if name.startswith("cpu-")]
        numbers = [1, 2, ENDLESS, 3, 4, 5, 6, 8]
        with sigstopped(*workers):
            sent = [send(stack, x, parameters=None if x == ENDLESS else PATIENT) for x in numbers]
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= len(sent))
        for x, connection in zip(numbers, sent, strict=True):
            if x != ENDLESS:
                assert answer(connection) == (200, str(x))
        assert answer(sent[numbers.index(ENDLESS)])[0] == 504
        wait_until(lambda: stack.metrics().value("millstream_requests_quarantined") == 1)


def test_a_run_has_a_limit_whatever_its_caller_would_wait_for(tmp_path: Path) -> None:
    model = models.endless(tmp_path / "slow.onnx", on=ENDLESS)
    with stack_with(tmp_path, model, timeout_ms=600_000, worker_run_s_max=5) as stack:
        status, said = answer(send(stack, ENDLESS))
        assert status == 500
        assert "ran longer than 5 s" in said
        assert answer(send(stack, 5)) == (200, "5")
