"""A request that kills the process that runs it: it alone gets an error, and its neighbours their answers."""

from __future__ import annotations

import http.client
import json
from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

LEAST = -(2**63)
DEADLY = -1
PATH = "/v2/models/fragile/infer"
#: longer than workers sleep: a lease that runs out runs a batch twice, and a deadly one kills a worker more
SETTINGS = {"queue_lease_s": 120}
ENDED = "was ended by SIGFPE"


def send(stack: Stack, x: int) -> http.client.HTTPConnection:
    body, headers = v2.request({"x": np.array([[x]], np.int64)}, parameters=v2.PATIENT)
    return stack.send(PATH, body, headers)


def answer(connection: http.client.HTTPConnection) -> tuple[int, object]:
    """Status, and the quotient or the error."""
    reply = connection.getresponse()
    body, headers = reply.read(), dict(reply.getheaders())
    connection.close()
    if reply.status != 200:
        return reply.status, json.loads(body)["error"]
    return 200, int(v2.outputs(body, headers)["y"][0, 0])


def workers(stack: Stack) -> list[int]:
    return [pid for name, pid in stack.pids().items() if name.startswith("cpu-")]


def deaths(stack: Stack) -> int:
    return sum(ENDED in line for line in stack.lines)


def test_only_the_request_that_kills_workers_gets_an_error(tmp_path: Path) -> None:
    fragile, steady = models.fragile(tmp_path / "fragile.onnx"), models.scale(tmp_path / "steady.onnx")
    row = np.ones((1, 2), np.float32)
    served = {"fragile": fragile, "steady": steady}
    with running_stack(tmp_path, pools="cpu=2", gateways=2, models=served, settings=SETTINGS) as stack:
        body = v2.request({"x": row}, parameters=v2.PATIENT)
        with constant_load(stack.port, "/v2/models/steady/infer", [body], callers=2) as load:
            with sigstopped(*workers(stack)):
                numbers = [2, 3, 4, DEADLY, 5, 6, 7]
                sent = [send(stack, x) for x in numbers]
                wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= len(sent))
            answers = [answer(connection) for connection in sent]
            for x, (status, said) in zip(numbers, answers, strict=True):
                if x == DEADLY:
                    assert (status, said) == (500, "the worker died every time it ran this request")
                else:
                    assert (status, said) == (200, -(-LEAST // x))
            load.more(20)
            wait_until(lambda: deaths(stack) == 2)

            # The same request is refused before it can do harm, whichever gateway it comes to.
            wait_until(lambda: stack.metrics().value("millstream_requests_quarantined") == 2)
            again = [answer(send(stack, DEADLY)) for _ in range(10)]
            assert {status for status, _ in again} == {500}
            assert all("refused for some minutes" in str(said) for _, said in again)
            assert answer(send(stack, 9)) == (200, -(-LEAST // 9))
            load.more(20)
        assert {reply.status for reply in load.answers} == {200}
        refused = stack.metrics().value("millstream_requests_refused_total", reason="quarantined")
        assert refused == len(again)
        assert deaths(stack) == 2
        print(
            f"{len(load.answers)} answers beside, {len(sent) + len(again) + 1} requests of the fragile model, "
            f"{deaths(stack)} deaths"
        )


def test_many_that_kill_workers_are_found_one_by_one(tmp_path: Path) -> None:
    fragile = models.fragile(tmp_path / "fragile.onnx")
    with running_stack(tmp_path, pools="cpu=2", models={"fragile": fragile}, settings=SETTINGS) as stack:
        with sigstopped(*workers(stack)):
            # Three rows each, so that no two of them are alike.
            rows = [np.array([[x], [DEADLY], [x]], np.int64) for x in (2, 3)]
            bodies = [v2.request({"x": x}, parameters=v2.PATIENT) for x in rows]
            deadly = [stack.send(PATH, *body) for body in bodies]
            harmless = [send(stack, x) for x in range(2, 12)]
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 12)
        assert [answer(connection)[0] for connection in deadly] == [500, 500]
        assert [answer(connection)[0] for connection in harmless] == [200] * 10
        wait_until(lambda: stack.metrics().value("millstream_requests_quarantined") == 2)
        print(f"2 of 12 requests kill workers: {deaths(stack)} deaths")
