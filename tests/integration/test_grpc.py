"""gRPC clients that people have against the running product, unchanged: tritonclient.grpc, its asyncio form,
KServe's.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import queue
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from millstream.services.model.datatypes import NUMPY
from tests.kit import models
from tests.kit.blocking import Blocking
from tests.kit.stack import CALL_S_MAX, Stack, assert_quiet, running_stack, sigstopped
from tests.kit.tools import CLIENTS
from tests.kit.wait import wait_until

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = A * 10 + 1
KINDS = (*sorted(set(NUMPY) - {"BF16"}), "BYTES")
LARGE = 100_000_000  # bytes
MESSAGE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("grpc")
    settings = {
        "open_control": True,
        "request_bytes_max": LARGE + 4096,
        "shm_bytes_max": 1 << 29,
        "queue_lease_s": 600,
    }
    # No lease ends while a test stops the worker.
    with running_stack(folder, gateways=2, pools="cpu=1", settings=settings) as stack:
        path = folder / "m.onnx"
        stack.push("add", models.add_sub(path), version=3)
        stack.push("add", models.add_sub(path), version=4, activate=False)
        stack.push("kinds", models.identities(path, datatypes=KINDS))
        stack.push("bf16", models.identity(path, datatype="BF16"))
        stack.push("wide", models.identity(path, shape=("N", "M")))
        stack.push("lookup", models.failing(path))
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


@pytest.fixture
def stub(stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(stack.grpc, MESSAGE) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture(params=["sync", "aio"])
def client(request: pytest.FixtureRequest, stack: Stack) -> Iterator[Any]:
    if request.param == "sync":
        with triton.InferenceServerClient(stack.grpc) as client:
            yield client
        return
    with asyncio.Runner() as runner:

        async def connect() -> Any:
            return triton_aio.InferenceServerClient(stack.grpc)

        client = Blocking(runner.run(connect()), runner)
        yield client
        client.close()


def tensor(name: str, array: Any, datatype: str = "FP32") -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def pair() -> list[Any]:
    return [tensor("a", A), tensor("b", B)]


def raw_request(model: str, name: str, array: Any, **fields: Any) -> Any:
    built = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()], **fields)
    built.inputs.add(name=name, datatype="FP32" if array.dtype == np.float32 else "INT64", shape=array.shape)
    return built


def rows(count: int = 1, columns: int = 2) -> Any:
    return np.arange(count * columns, dtype=np.float32).reshape(count, columns)


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    wait_until(client.is_server_ready, what="the server is ready")
    wait_until(lambda: client.is_model_ready("add"), what="the model is ready")
    assert client.is_model_ready("add", "4")
    assert not client.is_model_ready("nothing")
    assert not client.is_model_ready("add", "5")
    server = client.get_server_metadata()
    assert server.name
    assert "binary_tensor_data" in server.extensions
    model = client.get_model_metadata("add")
    assert (model.name, list(model.versions), model.platform) == ("add", ["3", "4"], "onnxruntime_onnx")
    assert [(one.name, one.datatype, list(one.shape)) for one in model.inputs] == [
        (name, "FP32", [-1, 4]) for name in ("a", "b")
    ]
    with pytest.raises(InferenceServerException, match="'nothing' is not found") as caught:
        client.get_model_metadata("nothing")
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="version should be an integral value") as caught:
        client.is_model_ready("add", "abc")
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_infer(client: Any) -> None:
    result = client.infer("add", pair())
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)
    np.testing.assert_array_equal(result.as_numpy("difference"), A - B)
    assert (result.get_response().model_version, result.get_response().id) == ("3", "")
    only = client.infer(
        "add",
        pair(),
        model_version="4",
        request_id="müller 7",
        outputs=[triton.InferRequestedOutput("difference")],
        priority=1,
        timeout=60_000_000,
        parameters={"mine": "yes"},
    )
    assert (only.get_response().model_version, only.get_response().id) == ("4", "müller 7")
    assert only.as_numpy("sum") is None
    np.testing.assert_array_equal(only.as_numpy("difference"), A - B)


def test_all_datatypes(client: Any) -> None:
    random = np.random.default_rng(1)
    arrays = {
        kind: np.array([["", "é", "x" * 500]], object)
        if kind == "BYTES"
        else random.integers(0, 2, (1, 3)).astype(NUMPY[kind])
        for kind in KINDS
    }
    result = client.infer("kinds", [tensor(f"x{i}", arrays[kind], kind) for i, kind in enumerate(KINDS)])
    for i, kind in enumerate(KINDS):
        got = result.as_numpy(f"y{i}")
        if kind == "BYTES":
            got = np.array([[item.decode() for item in got.ravel()]], object)
        np.testing.assert_array_equal(got, arrays[kind])
    half = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    got = client.infer("bf16", [tensor("x", half, "BF16")]).as_numpy("y")
    np.testing.assert_array_equal(got.astype(np.float32), half.astype(np.float32))


def test_typed_contents(stub: Any) -> None:
    request = pb.ModelInferRequest(model_name="add")
    for name, array in (("a", A), ("b", B)):
        request.inputs.add(name=name, datatype="FP32", shape=array.shape).contents.fp32_contents.extend(array.ravel())
    reply = stub.ModelInfer(request)
    assert reply.raw_output_contents[0] == (A + B).tobytes()
    assert not any(output.HasField("contents") for output in reply.outputs)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(client: Any, algorithm: str) -> None:
    x = np.zeros((8, 4096), np.float32)
    np.testing.assert_array_equal(
        client.infer("wide", [tensor("x", x)], compression_algorithm=algorithm).as_numpy("y"), x
    )


class Relay:
    """Passes bytes on to a server and counts what it answers."""

    def __init__(self, target: str) -> None:
        self.answered = 0
        self.ended = asyncio.Event()
        self._target = target.rpartition(":")

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.answered += len(data) if count else 0
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._target[0], int(self._target[2]))
        await asyncio.gather(
            self._pass(reader, there_writer, count=False), self._pass(there_reader, writer, count=True)
        )
        for one in (writer, there_writer):
            with suppress(ConnectionError):
                await one.wait_closed()
        self.ended.set()


@pytest.mark.parametrize(("compressed", "headers"), [("gzip", None), ("deflate", None), (None, "gzip"), (None, None)])
def test_an_answer_is_compressed_for_who_compresses_or_asks(stack: Stack, compressed: Any, headers: Any) -> None:
    async def answered() -> int:
        relay = Relay(stack.grpc)
        server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            x = np.zeros((8, 8192), np.float32)
            asked = {"accept-encoding": headers} if headers else None
            got = await client.infer("wide", [tensor("x", x)], compression_algorithm=compressed, headers=asked)
            np.testing.assert_array_equal(got.as_numpy("y"), x)
        await asyncio.wait_for(relay.ended.wait(), 120)
        server.close()
        return relay.answered

    assert (asyncio.run(answered()) < 100_000) == bool(compressed or headers)


def test_a_tensor_of_100_mb(stack: Stack) -> None:
    x = np.random.default_rng(2).random((1, LARGE // 4), np.float32)
    with triton.InferenceServerClient(stack.grpc) as client:
        np.testing.assert_array_equal(client.infer("wide", [tensor("x", x)]).as_numpy("y"), x)


def test_what_is_too_large_is_refused(stack: Stack, stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(raw_request("wide", "x", rows(1, LARGE // 4 + 2048)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in caught.value.details()
    bomb = gzip.compress(b"\0" * (LARGE + 8192))
    with grpc.insecure_channel(stack.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(bomb)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"larger than the limit of {LARGE + 4096} bytes" in caught.value.details()
        for body, text in ((b"\xff\xff", "is not an inference.ModelInferRequest"), (b"\x1f\x8b", "not valid gzip")):
            with pytest.raises(grpc.RpcError) as caught:
                call(body)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert text in caught.value.details() or "truncated" in caught.value.details()


@pytest.mark.parametrize(
    ("model", "version", "inputs", "status", "message"),
    [
        ("nothing", "", pair(), "NOT_FOUND", "Request for unknown model: 'nothing' is not found"),
        ("add", "9", pair(), "NOT_FOUND", "Request for unknown model: 'add' version 9 is not found"),
        ("add", "x", pair(), "INVALID_ARGUMENT", "version should be an integral value"),
        ("add", "", pair()[:1], "INVALID_ARGUMENT", r"missing required input\(s\) \['b'\]"),
        ("add", "", [*pair(), tensor("c", A)], "INVALID_ARGUMENT", "unexpected inference input 'c'"),
        ("add", "", [tensor("a", A[:, :3]), tensor("b", B)], "INVALID_ARGUMENT", "unexpected shape for input 'a'"),
        ("lookup", "", [tensor("index", np.array([[99]]), "INT64")], "INTERNAL", "Integer division by zero"),
    ],
)
def test_what_is_wrong(client: Any, model: str, version: str, inputs: Any, status: str, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(model, inputs, model_version=version)
    assert caught.value.status() == f"StatusCode.{status}"
    with pytest.raises(InferenceServerException, match="sequences are not supported") as caught:
        client.infer("add", pair(), sequence_id=5)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def in_flight(stack: Stack) -> float:
    """Canaries among them: a few, while no worker answers."""
    return stack.metrics().value("millstream_requests_in_flight")


def test_deadlines_and_cancellation(stack: Stack, client: Any, stub: Any) -> None:
    with sigstopped(stack.pids()["cpu-0"]):
        for options in ({"client_timeout": 0.3}, {"timeout": 300_000}):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("add", pair(), **options)
            assert "DEADLINE_EXCEEDED" in str(caught.value) or "Deadline Exceeded" in str(caught.value)
        # the lane hears of the call's own end: nothing is left of these although no worker answers
        calls = [stub.ModelInfer.future(raw_request("wide", "x", rows()), timeout=CALL_S_MAX) for _ in range(50)]
        wait_until(lambda: in_flight(stack) >= 50)
        for call in calls:
            call.cancel()
        wait_until(lambda: in_flight(stack) < 25)
        calls = [stub.ModelInfer.future(raw_request("wide", "x", rows()), timeout=1.5) for _ in range(50)]
        assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        wait_until(lambda: in_flight(stack) < 25)
    np.testing.assert_array_equal(client.infer("add", pair(), client_timeout=CALL_S_MAX).as_numpy("sum"), A + B)


def test_many_at_once(stack: Stack) -> None:
    async def call_all() -> list[Any]:
        async with triton_aio.InferenceServerClient(stack.grpc) as client:
            return await asyncio.gather(
                *(client.infer("add", [tensor("a", A + i), tensor("b", B)]) for i in range(300))
            )

    for i, result in enumerate(asyncio.run(call_all())):
        np.testing.assert_array_equal(result.as_numpy("sum"), A + i + B)


def test_a_stream_answers_in_order_and_outlives_errors(stack: Stack) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(stack.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(200):
            client.async_stream_infer(
                "add" if i % 10 else "nothing",
                [tensor("a", A + i), tensor("b", B)],
                request_id=str(i),
                enable_empty_final_response=i % 3 == 0,
            )
        for i in range(200):
            result, error = answers.get(timeout=CALL_S_MAX)
            if i % 10 == 0:
                assert "'nothing' is not found" in str(error)
                continue
            assert error is None
            response = result.get_response()
            assert response.id == str(i)
            assert response.parameters["triton_final_response"].bool_param
            np.testing.assert_array_equal(result.as_numpy("sum"), A + i + B)
        client.stop_stream()


def test_errors_of_a_stream(stub: Any) -> None:
    good, bad = raw_request("wide", "x", rows(), id="good"), raw_request("nothing", "x", rows(), id="bad")
    replies = list(stub.ModelStreamInfer(iter([good, bad, good])))
    assert [reply.infer_response.id for reply in replies] == ["good", "bad", "good"]
    assert [bool(reply.error_message) for reply in replies] == [False, True, False]
    metadata = (("triton_grpc_error", "true"),)
    call = stub.ModelStreamInfer(iter([good, bad, good]), metadata=metadata)
    assert next(call).infer_response.id == "good"
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert list(stub.ModelStreamInfer(iter([]))) == []
    packed = list(stub.ModelStreamInfer(iter([bad]), compression=grpc.Compression.Gzip))
    assert packed[0].infer_response.id == "bad"


def test_a_stream_has_so_many_requests_in_flight_and_a_caller_that_goes_leaves_none(stack: Stack, stub: Any) -> None:
    with sigstopped(stack.pids()["cpu-0"]):
        sent = iter([raw_request("wide", "x", rows(), id=str(i)) for i in range(1000)])
        call = stub.ModelStreamInfer(sent)
        # one whose reply is awaited, those in the line behind it, and one that waits for a place there
        wait_until(lambda: in_flight(stack) >= 130)
        assert call.is_active()
        assert in_flight(stack) < 155
        call.cancel()
        wait_until(lambda: in_flight(stack) < 25)


def test_health_as_probes_see_it(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "inference.GRPCInferenceService"):
            watch = health.Watch(health_pb2.HealthCheckRequest(service=service))
            # A test before this one stopped the worker: it may take a moment until its gateway is ready again.
            assert any(seen.status == serving for seen in watch)
            watch.cancel()
            wait_until(partial(_serves, health, service), what="a check that finds it serving")
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service="other"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def _serves(health: Any, service: str) -> bool:
    status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


def test_who_sends_nothing_or_reads_nothing_holds_nobody_up(stack: Stack, client: Any) -> None:
    host, _, port = stack.grpc.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(50)]
    for one in silent:
        one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    with grpc.insecure_channel(stack.grpc, [*MESSAGE, ("grpc.http2.lookahead_bytes", 1024)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelStreamInfer(iter([raw_request("wide", "x", rows(1, 1 << 20))])) for _ in range(4)]
        for _ in range(20):
            np.testing.assert_array_equal(client.infer("add", pair(), client_timeout=CALL_S_MAX).as_numpy("sum"), A + B)
        for call in calls:
            call.cancel()
    for one in silent:
        one.close()


def test_both_gateways_answer(stack: Stack) -> None:
    pids = stack.pids()
    for index in (0, 1):
        with sigstopped(pids[f"gateway-{1 - index}"]):
            # the kernel may choose the one that sleeps: then another connection is made
            wait_until(lambda: _answers(stack), what=f"gateway-{index} answers")


def _answers(stack: Stack) -> bool:
    with grpc.insecure_channel(stack.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return bool(stub.ServerLive(pb.ServerLiveRequest(), timeout=5).live)
        except grpc.RpcError:
            return False


def test_what_serves_is_looked_after_over_grpc(client: Any) -> None:
    """The same as over HTTP, against the product; the messages in detail are in test_grpc_management.py."""
    assert client.get_model_config("add").config.input[0].name == "a"
    before = client.get_inference_statistics("add").model_stats[0].inference_count
    client.infer("add", pair())
    assert client.get_inference_statistics("add").model_stats[0].inference_count == before + len(A)
    index = {(model.name, model.version): model.state for model in client.get_model_repository_index().models}
    assert index["add", "3"] == "READY"
    client.unload_model("lookup")
    assert not client.is_model_ready("lookup")
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.get_model_metadata("lookup")
    client.load_model("lookup")
    wait_until(lambda: client.is_model_ready("lookup"), what="it is ready again")
    with pytest.raises(InferenceServerException, match="failed to load 'nope'"):
        client.load_model("nope")
    assert client.update_trace_settings(settings={"trace_rate": "7"}).settings["trace_rate"].value[:] == ["7"]
    assert client.get_trace_settings("add").settings["trace_rate"].value[:] == ["7"]
    client.update_trace_settings(settings={"trace_rate": None})
    assert client.update_log_settings({"log_verbose_level": 1}).settings["log_verbose_level"].uint32_param == 1
    client.update_log_settings({"log_verbose_level": 0})
    with pytest.raises(InferenceServerException, match="Client shared memory is disabled"):
        client.register_system_shared_memory("r", "/r", 8)


@pytest.mark.needs("kserve")
def test_kserves_client(stack: Stack) -> None:
    program = Path(__file__).parent / "programs" / "kserve_grpc_client.py"
    done = subprocess.run(
        [CLIENTS / "bin" / "python", "-P", program, stack.grpc, "wide"],
        capture_output=True,
        text=True,
        timeout=CALL_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "live": True,
        "ready": True,
        "model": True,
        "raw": ["k", "wide", values],
        "typed": ["k", "wide", values],
    }
