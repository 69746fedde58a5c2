"""gRPC clients that stop in the middle of a request: what they hold is bounded and ends in time; other callers lose no
answer.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Self

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.kit import http2, models
from tests.kit.memory import MIB, forget_peak, peak_bytes, resident_bytes
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

BUDGET = 64 * MIB
#: what comes between two looks of the gateway, and what its allocator does not give back
SLACK = 256 * MIB
MESSAGE = 40 * MIB
STREAMS = 40
LITTLE = 512 * 1024  # of a message, on each of many connections
SLOW_S = 4
X = np.array([[1, 2]], np.float32)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("half")
    settings = {"inflight_bytes_max": BUDGET, "client_stall_s_max": SLOW_S, "inflight_requests_max": 512}
    with running_stack(folder, settings=settings, models={"small": models.scale(folder / "s.onnx")}) as stack:
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def port(stack: Stack) -> int:
    return int(stack.grpc.rpartition(":")[2])


def gateway(stack: Stack) -> int:
    return stack.pids()["gateway-0"]


def request() -> Any:
    built = pb.ModelInferRequest(model_name="small", raw_input_contents=[X.tobytes()])
    built.inputs.add(name="x", datatype="FP32", shape=X.shape)
    return built


class Caller:
    """Calls one after the other in a thread, each over a connection of its own; `answered`: how many succeeded."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._stopping = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with grpc.insecure_channel(self._target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                try:
                    reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request(), timeout=WAIT_S)
                    assert np.frombuffer(reply.raw_output_contents[0], np.float32).tolist() == [2, 4]
                    self.answered += 1
                except grpc.RpcError as error:
                    self.failed.append(f"{error.code()}: {error.details()}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)


def half_sent(at: int, path: str, streams: int) -> http2.Connection:
    """A connection on which half of a message was sent in each of so many calls, as far as it was taken."""
    connection = http2.Connection(at)
    half = bytes(MESSAGE // 2)
    for _ in range(streams):
        stream = connection.begin(path)
        if connection.give(stream, http2.prefix(MESSAGE)):
            connection.give(stream, half)
        if connection.closed:
            break
    return connection


@pytest.mark.parametrize("path", [http2.INFER, http2.STREAM_INFER])
def test_half_sent_messages_share_one_budget(stack: Stack, path: str) -> None:
    pid = gateway(stack)
    refused = stack.metrics().value("millstream_requests_refused_total", reason="receiving_full")
    before = resident_bytes(pid)
    forget_peak(pid)
    with Caller(stack.grpc) as caller, ThreadPoolExecutor(2) as pool:
        connections = list(pool.map(lambda _: half_sent(port(stack), path, STREAMS // 2), range(2)))
        wait_until(lambda: caller.answered > 5, what="others are answered")
        assert stack.http.get("/v2/health/ready").status_code == 200
    grown = peak_bytes(pid) - before
    print(f"{STREAMS * MESSAGE // 2 // MIB} MiB were sent, {grown // MIB} MiB were held")
    assert grown < BUDGET + SLACK
    assert not caller.failed
    assert stack.metrics().value("millstream_requests_refused_total", reason="receiving_full") > refused

    def told() -> bool:
        for connection in connections:
            if not connection.closed:
                take_all(connection)
        return b"are being received" in b"".join(text for one in connections for text in one.said.values())

    wait_until(told, what="those who are refused are told why")
    for connection in connections:
        connection.close()
    wait_until(
        lambda: stack.metrics().value("millstream_requests_receiving_bytes") == 0, what="nothing is held for them"
    )


def test_many_connections_that_hold_little_share_the_budget_too(stack: Stack) -> None:
    def refused() -> float:
        return stack.metrics().value("millstream_requests_refused_total", reason="receiving_full")

    before = refused()
    connections = [http2.Connection(port(stack)) for _ in range(2 * BUDGET // LITTLE)]
    for connection in connections:
        stream = connection.begin(http2.STREAM_INFER)
        if connection.give(stream, http2.prefix(MESSAGE)):
            connection.give(stream, bytes(LITTLE))
    wait_until(lambda: refused() > before, WAIT_S, "the oldest are refused")
    wait_until(
        lambda: 0 < stack.metrics().value("millstream_requests_receiving_bytes") <= BUDGET,
        WAIT_S,
        "the others may go on",
    )
    for connection in connections:
        connection.close()


def test_half_sent_bodies_of_http_count_in_the_same_budget(stack: Stack) -> None:
    """On the fast path, on a route of another protocol, on a route that loads files, and over gRPC."""

    part = 8 * MIB

    def counted(bodies: int) -> bool:
        return stack.metrics().value("millstream_requests_receiving_bytes") >= bodies * part

    address = (stack.http.base_url.host, stack.http.base_url.port)
    paths = ("/v2/models/small/infer", "/v1/models/small:predict", "/v2/repository/models/small/load")
    with ExitStack() as open_now:
        for count, path in enumerate(paths, 1):
            client = open_now.enter_context(socket.create_connection(address))
            client.sendall(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), 2 * part)
            )
            client.sendall(bytes(part))
            wait_until(partial(counted, count), WAIT_S, f"{path} counts")
        connection = open_now.enter_context(http2.Connection(port(stack)))
        stream = connection.begin(http2.INFER)
        assert connection.give(stream, http2.prefix(2 * part))
        connection.give(stream, bytes(part))
        wait_until(lambda: counted(len(paths) + 1), WAIT_S, "gRPC counts")
    wait_until(
        lambda: stack.metrics().value("millstream_requests_receiving_bytes") == 0, WAIT_S, "nothing is counted for them"
    )


def test_unary_calls_that_stop_end_in_time_and_streams_may_be_silent(stack: Stack) -> None:
    with http2.Connection(port(stack)) as connection:
        half = connection.begin(http2.INFER)
        assert connection.give(half, http2.prefix(1000) + bytes(500))
        silent = connection.begin(http2.INFER)
        idle = connection.begin(http2.STREAM_INFER)
        admin = connection.begin("/inference.GRPCInferenceService/RepositoryIndex")
        health = connection.begin("/grpc.health.v1.Health/Check")

        def over() -> bool:
            connection.take(0.1)
            return {half, silent, admin, health} <= connection.ended

        wait_until(over, WAIT_S, "what stopped has ended")
        assert all(b"slower than" in connection.said[stream] for stream in (half, silent, admin, health))
        assert idle not in connection.ended
        assert not connection.closed
        body = request().SerializeToString()
        assert connection.give(idle, http2.prefix(len(body)) + body, end=True)
        wait_until(lambda: connection.take(0.1) is not None and idle in connection.ended, what="the stream is answered")


def test_calls_without_a_message_do_not_crowd_out_others(stack: Stack) -> None:
    with (
        http2.Connection(port(stack)) as first,
        http2.Connection(port(stack)) as second,
        Caller(stack.grpc) as caller,
    ):
        for connection in (first, second):
            for _ in range(600):  # in all more than there may be calls
                connection.begin(http2.STREAM_INFER)
        wait_until(lambda: take_all(first) + take_all(second) > 0, WAIT_S, "the oldest are ended")
        answered = caller.answered
        wait_until(lambda: caller.answered > answered + 5, what="others are answered")


def take_all(connection: http2.Connection) -> int:
    """How many streams the server has ended."""
    while connection.take(0.01):
        pass
    return len(connection.ended)


def floods() -> dict[str, Any]:
    def reset(connection: http2.Connection) -> None:
        for _ in range(200):
            batch = []
            for _ in range(100):
                stream = connection.number()
                batch += [http2.call(stream, http2.INFER), http2.frame(http2.RST_STREAM, 0, stream, b"\0\0\0\x08")]
            connection.send(*batch)

    def settings(connection: http2.Connection) -> None:
        connection.send(*[http2.frame(http2.SETTINGS, 0, 0)] * 200_000)

    def pings(connection: http2.Connection) -> None:
        connection.send(*[http2.frame(http2.PING, 0, 0, bytes(8))] * 200_000)

    def empty(connection: http2.Connection) -> None:
        stream = connection.begin(http2.INFER)
        connection.send(*[http2.frame(http2.DATA, 0, stream)] * 200_000)

    return {"begun and reset": reset, "settings": settings, "pings": pings, "empty frames": empty}


@pytest.mark.parametrize("kind", floods())
def test_floods_of_frames_cost_nobody_an_answer(stack: Stack, kind: str) -> None:
    pid = gateway(stack)
    before = resident_bytes(pid)
    forget_peak(pid)
    with Caller(stack.grpc) as caller:
        for _ in range(3):
            # it may be cut off, or not read any more
            with http2.Connection(port(stack), receive_bytes=4096) as connection, suppress(OSError):
                floods()[kind](connection)
        answered = caller.answered
        wait_until(lambda: caller.answered > answered + 5, what="others are answered")
    assert caller.failed == []
    assert peak_bytes(pid) - before < SLACK
    assert gateway(stack) == pid
