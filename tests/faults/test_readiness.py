"""Health that cannot lie: ready turns false when nothing is answered any more, and true again; live stays true all
along.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.kit import models, v2
from tests.kit.load import Load, constant_load
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

SERVER = "/v2/health/ready"
MODEL = "/v2/models/small/ready"
VERSION = "/v2/models/small/versions/1/ready"
PATHS = (SERVER, MODEL, VERSION)
#: the promise is 3 s; a machine that does much else at the same time gets more
TURN_S_MAX = 60.0
START_S_MAX = 120.0  # of new processes
RUNS_S = (10.0, 30.0, 70.0)  # on a machine as busy as it was a moment before; the longer ones if it is not
LOADS, LOADS_MAX = 3, 12


def turn(stack: Stack, ready: bool, timeout_s: float = TURN_S_MAX) -> dict[str, float]:
    """Wait until every path says whether it is `ready`; how many seconds each of them took. It is live all along."""
    began = time.monotonic()
    seconds: dict[str, float] = {}

    def turned() -> bool:
        live = stack.http.get("/v2/health/live")
        assert (live.status_code, live.json()) == (200, {"live": True})
        for path in PATHS:
            reply = stack.http.get(path)
            assert (reply.status_code, reply.json()["ready"]) in {(200, True), (503, False)}
            assert reply.json()["ready"] or reply.json()["error"]
            if reply.json()["ready"] is ready:
                seconds.setdefault(path, round(time.monotonic() - began, 2))
            else:
                seconds.pop(path, None)  # it went back
        return len(seconds) == len(PATHS)

    try:
        wait_until(turned, timeout_s)
    except AssertionError as error:
        raise AssertionError(f"of {PATHS} only {seconds} turned to ready={ready} within {timeout_s:g} s") from error
    return seconds


def workers(stack: Stack) -> list[int]:
    return [pid for name, pid in stack.pids().items() if name.startswith("cpu-")]


@contextmanager
def answered(stack: Stack) -> Iterator[Load]:
    """Callers meanwhile, all of which get their answers: waiting callers do not make a model ready."""
    inputs = [np.full((1, 2), i, np.float32) for i in range(4)]
    bodies = [v2.request({"x": x}, parameters=v2.PATIENT) for x in inputs]
    with constant_load(stack.port, "/v2/models/small/infer", bodies, callers=2) as load:
        load.more(10)
        yield load
        load.more(10)
    statuses = [answer.status for answer in load.answers]
    print({"requests": len(statuses), "200": statuses.count(200), "failed": len(statuses) - statuses.count(200)})
    for answer in load.answers:
        assert answer.status == 200, answer.body
        got = v2.outputs(answer.body, answer.headers)["y"]
        np.testing.assert_array_equal(got, inputs[answer.sent] * np.float32(2.0))


def is_worker(name: str) -> bool:
    return name.startswith("cpu-")


def is_redis(name: str) -> bool:
    return name == "redis"


@pytest.mark.parametrize("who", [is_worker, is_redis], ids=["all workers", "Redis"])
def test_ready_is_false_while_those_who_answer_are_frozen(tmp_path: Path, who: Callable[[str], bool]) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, pools="cpu=2", models={"small": path}) as stack:
        turn(stack, True)
        for _ in range(2):
            with answered(stack):
                with sigstopped(*(pid for name, pid in stack.pids().items() if who(name))):
                    print({"frozen": turn(stack, False)})
                print({"thawed": turn(stack, True)})


def test_ready_is_false_while_all_workers_are_dead(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, pools="cpu=2", models={"small": path}) as stack:
        turn(stack, True)
        with answered(stack):
            with sigstopped(stack.process.pid):  # the supervisor: no process sees them die or starts new ones
                for pid in workers(stack):
                    os.kill(pid, signal.SIGKILL)
                print({"killed": turn(stack, False)})
                wait_until(lambda: not workers(stack), what="all have ended")
            wait_until(lambda: len(workers(stack)) == 2, START_S_MAX)
            print({"processes are back": turn(stack, True, START_S_MAX)})


def test_ready_is_false_while_a_worker_lives_and_answers_nothing(tmp_path: Path) -> None:
    """It is in a run that takes very long; its heartbeat goes on."""
    with running_stack(tmp_path, models={"small": models.scale(tmp_path / "m.onnx")}) as stack:
        stack.push("long", loop(tmp_path / "loop.onnx"), config='{"rows_max": 1}')
        turn(stack, True)
        began = time.monotonic()
        body, headers = v2.request({"rounds": np.array([[100_000]], np.int64)})
        reply = stack.http.post("/v2/models/long/infer", content=body, headers=headers)
        assert reply.status_code == 200
        round_s = (time.monotonic() - began) / 100_000
        for run_s in RUNS_S:
            rounds = np.array([[round(run_s / round_s)]], np.int64)
            body, headers = v2.request({"rounds": rounds}, parameters=v2.PATIENT)
            running = stack.send("/v2/models/long/infer", body, headers)
            try:
                print({"stuck": turn(stack, False, run_s)})
                break
            except AssertionError:
                if run_s == RUNS_S[-1]:
                    raise
            finally:
                answer = running.getresponse()
                assert answer.status == 200, answer.read()
                answer.read()
                running.close()
        print({"free again": turn(stack, True)})
        with answered(stack):
            pass


def loop(path: Path) -> Path:
    """A model that runs as long as it is told: "rounds" INT64 [N, 1] -> "y" FP32 [N, 1], 128 x 128 matrix products."""
    rotation, _ = np.linalg.qr(np.random.default_rng(3).standard_normal((128, 128)))
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["going_on"]),
            helper.make_node("MatMul", ["state", "rotation"], ["state_next"]),
        ],
        "body",
        [
            info("round", TensorProto.INT64, []),
            info("going", TensorProto.BOOL, []),
            info("state", TensorProto.FLOAT, ["N", 128]),
        ],
        [info("going_on", TensorProto.BOOL, []), info("state_next", TensorProto.FLOAT, ["N", 128])],
    )
    nodes = [
        helper.make_node("ReduceMax", ["rounds"], ["most"], keepdims=0),
        helper.make_node("Cast", ["rounds"], ["column"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["column", "ones"], ["wide"]),
        helper.make_node("Loop", ["most", "", "wide"], ["state_last"], body=body),
        helper.make_node("ReduceSum", ["state_last", "axes"], ["y"], keepdims=1),
    ]
    weights = [
        numpy_helper.from_array(rotation.astype(np.float32), "rotation"),
        numpy_helper.from_array(np.ones((1, 128), np.float32), "ones"),
        numpy_helper.from_array(np.array([1], np.int64), "axes"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [info("rounds", TensorProto.INT64, ["N", 1])],
        [info("y", TensorProto.FLOAT, ["N", 1])],
        weights,
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", models.OPSET)], ir_version=models.IR_VERSION
    )
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def test_the_only_model_is_ready_when_its_load_is_answered(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:

        def ready() -> list[int]:
            return [stack.http.get(path).status_code for path in ("/v2/health/ready", "/v2/models/m/ready")]

        assert ready() == [200, 404]
        stack.push("m", models.scale(tmp_path / "m.onnx"))
        wait_until(lambda: ready() == [200, 200])
        at_once = 0
        for _ in range(LOADS_MAX):  # a worker that this machine lets wait for seconds is rightly not ready
            assert stack.http.post("/v2/repository/models/m/unload").status_code == 200
            assert stack.http.post("/v2/repository/models/m/load").status_code == 200
            at_once += ready() == [200, 200]
            if at_once == LOADS:
                break
        assert at_once == LOADS
        with ThreadPoolExecutor(1) as threads:
            with sigstopped(stack.pids()["cpu-0"]):
                assert stack.http.post("/v2/repository/models/m/unload").status_code == 200
                loading = threads.submit(lambda: stack.http.post("/v2/repository/models/m/load"))
                wait_until(lambda: ready()[0] != 200, what="the worker is gone")
            assert loading.result(START_S_MAX).status_code == 200
        wait_until(lambda: ready() == [200, 200])
