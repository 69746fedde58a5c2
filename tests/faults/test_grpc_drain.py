"""Every process is replaced, or told to stop, while gRPC callers go on: no call fails, and none is cut off."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.faults.test_rolling_restart import restarted
from tests.kit import models
from tests.kit.stack import Stack, running_stack, sigstopped
from tests.kit.wait import wait_until

#: Far longer than a drain takes, also on a busy machine. Connections reach their greatest age within 10 s.
SETTINGS: dict[str, Any] = {"drain_s": 60, "queue_lease_s": 240}
DRAIN_S = 8
BUSY_S = 200  # what a machine that has much else to do may take longer: less than a lease
OWN = [("grpc.use_local_subchannel_pool", 1)]
WAIT_S = 120.0


def request(number: int = 1) -> Any:
    array = np.full((1, 2), number, np.float32)
    built = pb.ModelInferRequest(model_name="m", id=str(number), raw_input_contents=[array.tobytes()])
    built.parameters["timeout"].int64_param = round(WAIT_S * 1e6)  # a worker may be paused, or wait, for long
    built.inputs.add(name="x", datatype="FP32", shape=(1, 2))
    return built


class Callers:
    """Unary callers, each with a connection of its own, in a thread. `outcomes`: status names, OK for right answers."""

    def __init__(self, target: str, number: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._target = target
        self._number = number
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="grpc callers")

    async def _run(self) -> None:
        await asyncio.gather(*(self._call() for _ in range(self._number)))

    async def _call(self) -> None:
        async with grpc.aio.insecure_channel(self._target, OWN) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self._stopping.is_set():
                number = sum(self.outcomes.values())
                try:
                    reply = await stub.ModelInfer(request(number), timeout=WAIT_S)
                    right = np.frombuffer(reply.raw_output_contents[0], np.float32)[0] == np.float32(2 * number)
                    self.outcomes["OK" if right and reply.id == str(number) else "WRONG"] += 1
                except grpc.aio.AioRpcError as error:
                    self.outcomes[f"{error.code().name} {error.details()}"] += 1

    def more(self, number: int) -> None:
        wanted = sum(self.outcomes.values()) + number
        wait_until(lambda: sum(self.outcomes.values()) >= wanted, what=f"{number} more answers")


@contextmanager
def calling(stack: Stack, number: int) -> Iterator[Callers]:
    callers = Callers(stack.grpc, number)
    callers._thread.start()
    try:
        yield callers
    finally:
        callers._stopping.set()
        callers._thread.join(WAIT_S)
    assert set(callers.outcomes) == {"OK"}, callers.outcomes


@pytest.mark.parametrize("gateways", [1, 2])
def test_everything_is_replaced_under_load_and_no_call_fails(tmp_path: Path, gateways: int) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, gateways=gateways, models={"m": path}, settings=SETTINGS) as stack:
        with calling(stack, 12) as callers:
            callers.more(50)
            replaced = restarted(stack)
            callers.more(50)
        assert len(replaced) == 1 + gateways
        print(f"{gateways} gateways: {callers.outcomes['OK']} answers, none failed; {replaced}")


def test_a_gateway_that_is_told_to_stop_says_so_and_answers_what_it_has(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings=SETTINGS) as stack:
        with grpc.insecure_channel(stack.grpc, OWN) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            idle = stub.ModelStreamInfer(iter(threading.Event().wait, None))  # asks nothing, ever
            with sigstopped(stack.pids()["cpu-0"]):
                sent = [stub.ModelInfer.future(request(i)) for i in range(20)]
                wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 20, what="in flight")
                stack.process.send_signal(signal.SIGTERM)
                assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
                assert list(watch) == []  # and ends
                with pytest.raises(grpc.RpcError) as caught:
                    next(idle)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            replies = [call.result(WAIT_S) for call in sent]
            assert [reply.id for reply in replies] == [str(i) for i in range(20)]
        assert stack.end() == 0


def test_what_is_not_answered_in_time_is_refused_not_cut(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings=SETTINGS | {"drain_s": DRAIN_S}) as stack:
        with sigstopped(stack.pids()["cpu-0"]), grpc.insecure_channel(stack.grpc, OWN) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            sent = [stub.ModelInfer.future(request(i)) for i in range(10)]
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") >= 10)
            began = time.monotonic()
            stack.process.send_signal(signal.SIGTERM)
            for call in sent:
                assert call.code() is grpc.StatusCode.UNAVAILABLE
                assert call.details() == "the gateway is shutting down: try another one"
                assert dict(call.trailing_metadata())["retry-after"] == "1"
            wait_until(lambda: "gateway-0" not in stack.pids(), what="gone")
        assert stack.end() == 0
        assert time.monotonic() - began < DRAIN_S + BUSY_S  # no lease had to expire


def test_a_gateway_that_is_killed_is_replaced_on_the_same_port(tmp_path: Path) -> None:
    path = models.scale(tmp_path / "m.onnx")
    with running_stack(tmp_path, models={"m": path}, settings=SETTINGS) as stack:
        pid = stack.pids()["gateway-0"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: stack.pids().get("gateway-0", pid) != pid, what="another gateway")
        with grpc.insecure_channel(stack.grpc, OWN) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ModelInfer(request(3), timeout=WAIT_S, wait_for_ready=True).id == "3"
