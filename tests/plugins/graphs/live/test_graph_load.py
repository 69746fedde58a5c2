"""Graphs under load, beside workers that are killed, callers who go, and steps of code that misbehaves."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from tests.kit import models, v2
from tests.kit.graphs import body, call, outputs, push_graph, steps_of
from tests.kit.load import constant_load
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

CALLERS = 16
GONE = 200
FUNCTION = """
import os, time
from typing import Annotated
import numpy as np
from numpy.typing import NDArray

Rows = Annotated[NDArray[np.float32], ("rows", 4)]

def f(x: Rows) -> Rows:
    match int(x.flat[0]):
        case 101:
            time.sleep(3600)
        case 102:
            os.abort()
        case 103:
            return np.ones((len(x) + 1, 4), np.float32)
        case 104:
            return np.ones((len(x), 5), np.float32)
        case 105:
            raise ValueError("no such luck")
    return x + 1
"""
SAID = {
    101: "the model ran longer than 1 s",
    102: "its process was ended by SIGABRT",
    103: "f returned 3 rows of 'output' for 2 rows",
    104: "its result has the shape [2, 5]",
    105: "ValueError: no such luck",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("load")
    with running_stack(folder / "home", pools="cpu=2") as running:
        running.push("double", models.scale(folder / "double.onnx", 2.0, 4))
        running.push("triple", models.scale(folder / "triple.onnx", 3.0, 4))
        (folder / "service.py").write_text(FUNCTION)
        running.push("code", folder / "service.py", config=json.dumps({"run_ms_max": 1000}))
        push_graph(running, "two", chain("double", "y", "triple", "y"))
        push_graph(running, "coded", chain("code", "output", "triple", "y"))
        yield running
        assert_quiet(running)


def chain(first: str, between: str, second: str, answer: str) -> dict[str, object]:
    steps = {
        "a": {"model": first, "inputs": {"x": "x"}},
        "b": {"model": second, "inputs": {"x": f"a.{between}"}},
    }
    return {"steps": steps, "outputs": {"y": f"b.{answer}"}}


def is_another(stack: Stack, number: int, before: int) -> bool:
    return stack.pids().get(f"cpu-{number}", before) != before


def test_workers_that_are_killed_under_load_lose_and_double_no_answer(stack: Stack) -> None:
    """Each caller has its own numbers, so that an answer for another one is seen."""
    sent = [np.full((1, 4), number, np.float32) for number in range(CALLERS)]
    bodies = [v2.request({"x": array}, parameters=v2.PATIENT) for array in sent]
    with constant_load(stack.port, "/v2/models/two/infer", bodies, callers=CALLERS) as load:
        for number in (0, 1, 0):
            load.more(2 * CALLERS)
            before = stack.pids()[f"cpu-{number}"]
            os.kill(before, signal.SIGKILL)
            wait_until(partial(is_another, stack, number, before))
        load.more(2 * CALLERS)
    assert {reply.status for reply in load.answers} == {200}
    for answer in load.answers:
        assert np.array_equal(v2.outputs(answer.body, answer.headers)["y"], 6 * sent[answer.sent])


def test_callers_who_go_in_the_middle_leave_nothing(stack: Stack) -> None:
    content = json.dumps(body(np.ones((1, 4), np.float32))).encode()
    for _ in range(2):
        connections = [stack.send("/v2/models/coded/infer", content, stack.headers) for _ in range(GONE)]
        for connection in connections:
            connection.close()
    wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") == 0)
    assert call(stack, "coded", np.ones((1, 4), np.float32)).status_code == 200


def test_a_step_of_code_that_misbehaves_fails_its_own_request_by_name(stack: Stack) -> None:
    right = np.ones((2, 4), np.float32)
    for value, why in SAID.items():
        reply = call(stack, "coded", np.full((2, 4), value, np.float32))
        assert reply.status_code == 500
        assert reply.json()["error"].startswith("step 'a' (model code v1): ")
        assert why in reply.json()["error"]
        wait_until(lambda: call(stack, "coded", right).status_code == 200)
        assert np.array_equal(outputs(call(stack, "two", right))["y"], 6 * right)


def test_64_steps_beside_each_other(stack: Stack) -> None:
    steps = {f"s{number}": {"model": "double", "inputs": {"x": "x"}} for number in range(64)}
    push_graph(stack, "wide", {"steps": steps, "outputs": {f"y{n}": f"s{n}.y" for n in range(64)}})
    before = steps_of(stack, "double")
    found = outputs(call(stack, "wide", np.ones((1, 4), np.float32)))
    assert len(found) == 64
    assert steps_of(stack, "double") == before + 64
