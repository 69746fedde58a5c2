"""Clients on grpc-core that call as fast as they can over one channel: no call fails, and no connection is cut off."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from tests.kit import models
from tests.kit.stack import Stack, assert_quiet, running_stack

THREADS = 16
CALLS = 800  # of each thread: grpc-core gives window some 25,000 times for them
WAIT_S = 240.0
Stub = service_pb2_grpc.GRPCInferenceServiceStub


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("speed")
    with running_stack(folder, models={"wide": models.identity(folder / "wide.onnx", shape=("N", "M"))}) as stack:
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def request(value: float = 1.0, columns: int = 8) -> pb.ModelInferRequest:
    row = np.full((1, columns), value, np.float32)
    message = pb.ModelInferRequest(model_name="wide", raw_input_contents=[row.tobytes()])
    message.inputs.add(name="x", datatype="FP32", shape=row.shape)
    return message


def in_threads(call: Callable[[int], str], calls: int = CALLS) -> Counter[str]:
    """Call from THREADS threads, `calls` times each, and return how often each status came."""

    def calls_of(thread: int) -> Counter[str]:
        return Counter(call(thread) for _ in range(calls))

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(calls_of, range(THREADS)), Counter())


def status_of(future: grpc.Future) -> str:
    try:
        future.result(WAIT_S)
    except grpc.FutureCancelledError:
        return "CANCELLED"
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


def test_calls_of_many_threads(stack: Stack) -> None:
    message = request()
    with grpc.insecure_channel(stack.grpc) as channel:
        infer = Stub(channel).ModelInfer
        statuses = in_threads(lambda _: status_of(infer.future(message, timeout=WAIT_S)))
    assert statuses == {"OK": THREADS * CALLS}


def test_half_of_the_calls_cancelled_at_once(stack: Stack) -> None:
    message = request()
    with grpc.insecure_channel(stack.grpc) as channel:
        infer = Stub(channel).ModelInfer

        def two(_: int) -> str:
            infer.future(message, timeout=WAIT_S).cancel()
            return status_of(infer.future(message, timeout=WAIT_S))

        statuses = in_threads(two, CALLS // 2)
    assert statuses == {"OK": THREADS * CALLS // 2}


def test_coroutines(stack: Stack) -> None:
    message = request()

    async def calls() -> int:
        async with grpc.aio.insecure_channel(stack.grpc) as channel:
            infer = Stub(channel).ModelInfer

            async def one() -> int:
                return sum([len((await infer(message, timeout=WAIT_S)).outputs) for _ in range(CALLS // 2)])

            return sum(await asyncio.gather(*(one() for _ in range(THREADS))))

    assert asyncio.run(calls()) == THREADS * CALLS // 2


def test_tritonclient_with_replies_over_several_windows(stack: Stack) -> None:
    """Rows of 600 KB: grpc-core measures the path with PING, and changes its window by SETTINGS."""
    row = np.arange(150_000, dtype=np.float32).reshape(1, -1)
    tensor = InferInput("x", row.shape, "FP32").set_data_from_numpy(row)
    with InferenceServerClient(stack.grpc) as client:

        def infer(_: int) -> str:
            found = client.infer("wide", [tensor]).as_numpy("y")
            return "OK" if np.array_equal(found, row) else "other values"

        assert in_threads(infer, 20) == {"OK": THREADS * 20}


def test_a_channel_for_each_call(stack: Stack) -> None:
    message = request()

    def infer(_: int) -> str:
        with grpc.insecure_channel(stack.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            return status_of(Stub(channel).ModelInfer.future(message, timeout=WAIT_S))

    assert in_threads(infer, 20) == {"OK": THREADS * 20}
