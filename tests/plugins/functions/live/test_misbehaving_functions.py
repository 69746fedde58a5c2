"""A function that crashes, hangs, takes memory or prints hurts its own version: its neighbour's calls are answered."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

FUNCTION = """
import os, time

def f(text: str) -> str:
    if text == "crash":
        os.abort()
    if text == "hang":
        time.sleep(3600)
    if text == "memory":
        return "x" * (8 << 30)
    if text == "print":
        while True:
            print("x" * 100)
    return text.upper()
"""
STEADY = "/v2/models/steady/infer"


def ask(stack: Stack, text: str, timeout_s: float = 60) -> tuple[int, str]:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
    body = {"inputs": [tensor], "parameters": {"timeout": int(timeout_s * 1e6)}}
    reply = stack.http.post("/v2/models/odd/infer", json=body)
    return reply.status_code, reply.json()["outputs"][0]["data"][0] if reply.status_code == 200 else reply.text


def test_each_misbehaviour_is_an_error_of_its_own_request_and_the_neighbour_answers(tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    path.write_text(FUNCTION)
    served = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, pools="cpu=1,memory=700MiB", models=served) as stack:
        stack.push("odd", path, config=json.dumps({"run_ms_max": 1000}))
        worker = stack.pids()["cpu-0"]
        body = v2.request({"x": np.ones((1, 2), np.float32)})
        with constant_load(stack.port, STEADY, [body], callers=1) as load:
            load.more(5)
            assert ask(stack, "good") == (200, "GOOD")
            for text, said in {
                "crash": "its process was ended by SIGABRT",
                "hang": "the model ran longer than 1 s",
                "memory": "out of memory",
                "print": "the model ran longer than 1 s",
            }.items():
                status, why = ask(stack, text)
                assert (status, said in why) == (500, True), why
                load.more(5)
                # After its process has ended, the version is loaded again: until then its calls wait, or may try again.
                wait_until(lambda: ask(stack, "good") == (200, "GOOD"))
            load.more(5)
        assert {reply.status for reply in load.answers} == {200}
        assert stack.pids()["cpu-0"] == worker, "the worker itself went on"


def test_requests_that_shared_the_run_of_a_crash_are_answered(tmp_path: Path) -> None:
    """Which of them did it is not known: each runs alone."""
    path = tmp_path / "service.py"
    path.write_text(FUNCTION)
    with running_stack(tmp_path, pools="cpu=1", settings={"queue_lease_s": 120}) as stack:
        stack.push("odd", path)
        words = ["one", "two", "crash", "three"]
        with sigstopped(stack.pids()["cpu-0"]):
            tensors = [
                v2.request({"text": np.array([[word.encode()]], object)[0]}, parameters=v2.PATIENT) for word in words
            ]
            sent = [stack.send("/v2/models/odd/infer", *one) for one in tensors]
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= len(sent))
        replies = [connection.getresponse() for connection in sent]
        assert [reply.status for reply in replies] == [200, 200, 500, 200]
        assert b"its process was ended by SIGABRT" in replies[2].read()
        for connection in sent:
            connection.close()


KEEPER = """
import numpy

kept, calls = [], 0

def f(mib: int) -> int:
    global calls
    calls += 1
    kept.append(numpy.ones(mib << 20, numpy.uint8))
    return calls
"""
INSTANCE, USED = "millstream_instance_memory_bytes", "millstream_worker_memory_used_bytes"
ENDED = "greedy version 1: its process was ended: it takes"
MIB = 1 << 20


def keep(stack: Stack, model: str, mib: int) -> tuple[int, str]:
    """Have a function keep more memory; return the status, and how often it was called since its load."""
    reply = stack.http.post(
        f"/v2/models/{model}/infer",
        json={"inputs": [{"name": "mib", "datatype": "INT64", "shape": [1], "data": [mib]}], "parameters": v2.PATIENT},
    )
    return reply.status_code, str(reply.json()["outputs"][0]["data"][0]) if reply.status_code == 200 else reply.text


def has_or_ended(stack: Stack, used_bytes: float) -> bool:
    return stack.metrics().value(USED) > used_bytes or ENDED in stack.logs()


def test_what_grows_while_it_runs_counts_in_its_worker_and_the_one_that_grew_most_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    path.write_text(KEEPER)
    served = {"steady": models.scale(tmp_path / "steady.onnx")}
    with running_stack(tmp_path, pools="cpu=1,memory=900MiB", models=served) as stack:
        for name in ("greedy", "modest"):
            stack.push(name, path)
        body = v2.request({"x": np.ones((1, 2), np.float32)})
        with constant_load(stack.port, STEADY, [body], callers=1) as load:
            used = stack.metrics().value(USED)
            assert keep(stack, "greedy", 450)[0] == 200
            wait_until(lambda: stack.metrics().value(INSTANCE, model="greedy") > 450 * MIB)
            wait_until(lambda: stack.metrics().value(USED) > used + 440 * MIB)
            expected = used + 440 * MIB
            while ENDED not in stack.logs():  # either process alone may take more
                answer = keep(stack, "modest", 30)
                assert answer[0] == 200
                expected += 29 * MIB
                wait_until(partial(has_or_ended, stack, expected))
            wait_until(lambda: keep(stack, "greedy", 1)[0] == 200)  # it was loaded again
            assert int(keep(stack, "modest", 1)[1]) > int(answer[1]), "it goes on"
            load.more(5)
        assert {reply.status for reply in load.answers} == {200}
        assert "millstream_evictions_total" not in {one.name for one in stack.metrics().samples}, "nothing made room"
