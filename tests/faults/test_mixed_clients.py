"""Hundreds of requests over HTTP/1.1, pipelines, gRPC and gRPC on the HTTP port: a gateway drains, or clients vanish.

All requests wait for the worker, which is stopped, so that a test decides what happens while they are under way.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import httpx2
import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.connections.message_framing import PREFIX_BYTES, prefix
from tests.integration.test_grpc_fast import Client, to
from tests.kit import models, v2
from tests.kit.http2_peer import GREETING
from tests.kit.load import Load, constant_load
from tests.kit.ports import free_port
from tests.kit.stack import Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until
from tests.kit.wire import Wire, post

PATH = "/v2/models/m/infer"
COLUMNS = 2
PLAIN, PIPELINES, PIPELINED = 60, 20, 8  # connections with one request; with several, and how many
CHANNELS, STREAMS = 10, 10  # connections of gRPC to each port, and calls of each
HALF = 10  # requests of each kind whose last byte comes while the gateway drains
#: requests of these that are admitted: those of a pipeline are taken one by one
ADMITTED = PLAIN + PIPELINES + 2 * CHANNELS * STREAMS
UNDER_WAY = PLAIN + PIPELINES * PIPELINED + 2 * CHANNELS * STREAMS
PATIENT = {"timeout": 300_000_000}  # us: while the worker is stopped, a busy machine may let it wait long
WAVES, CALLERS = 3, 3
ANSWERED = {"200", "grpc-status 0"}
REFUSED = {"503", "grpc-status 14", "beyond GOAWAY", "behind the last reply"}
SETTINGS = {"drain_s": 300, "queue_lease_s": 300, "client_stall_s_max": 240}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("mixed")
    path = models.scale(folder / "m.onnx", 2.0, COLUMNS)
    ports = dict.fromkeys(("http_port", "grpc_port"), free_port())
    with running_stack(folder, models={"m": path}, settings=SETTINGS | ports) as stack:
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def http_request(number: int) -> bytes:
    body, headers = v2.request(
        {"x": np.full((1, COLUMNS), number, np.float32)}, binary=False, binary_outputs=False, parameters=PATIENT
    )
    return post(PATH, body, *(f"{name}: {value}" for name, value in headers.items()))


def grpc_message(number: int) -> bytes:
    x = np.full((1, COLUMNS), number, np.float32)
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    request.parameters["timeout"].int64_param = PATIENT["timeout"]
    body = request.SerializeToString()
    return prefix(len(body)) + bytes(body)


def number_of_http(reply: Any) -> float:
    """Return the number of the request that a reply answers."""
    assert reply.status == 200, reply
    return float(orjson.loads(reply.body)["outputs"][0]["data"][0]) / 2


def number_of_grpc(data: bytes) -> float:
    reply = pb.ModelInferResponse.FromString(data[PREFIX_BYTES:])
    return float(np.frombuffer(reply.raw_output_contents[0], np.float32)[0]) / 2


class Call(NamedTuple):
    """A call on one connection of gRPC."""

    number: int
    stream: int


class Channel:
    """A connection of gRPC, on either port, with hand-written frames."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.calls: list[Call] = []

    @classmethod
    async def connect(cls, port: int) -> Channel:
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.send(GREETING)
        return cls(client)

    def call(self, number: int) -> None:
        """Begin a call that this connection has to answer."""
        self.give(self.begin(number), number)

    def begin(self, number: int) -> int:
        """Send the head of a call, and return its stream."""
        stream = 2 * len(self.calls) + 1
        self.calls.append(Call(number, stream))
        self.client.begin(stream, to("ModelInfer"))
        return stream

    def give(self, stream: int, number: int) -> None:
        self.client.give(stream, grpc_message(number))

    async def rest(self) -> Counter[str]:
        """Read until the server ends the connection; return what became of the calls. Raises AssertionError: cut."""
        client = self.client
        await client.until(lambda: client.closed)
        last = min(last for last, _ in client.goaways())
        outcomes: Counter[str] = Counter()
        for number, stream in self.calls:
            if stream > last:
                assert stream not in client.fields
                outcomes["beyond GOAWAY"] += 1
                continue
            assert client.ended.get(stream, "cut") is None, (number, client.goaways())
            status = client.fields[stream]["grpc-status"]
            if status == "0":
                assert number_of_grpc(client.data[stream]) == number
            outcomes[f"grpc-status {status}"] += 1
        return outcomes

    @property
    def sock(self) -> socket.socket:
        found: socket.socket = self.client._writer.get_extra_info("socket")
        return found

    def close(self) -> None:
        self.client.close()


class Line:
    """A connection of HTTP/1.1 with requests, one behind the other."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.numbers: list[int] = []

    @classmethod
    async def connect(cls, port: int) -> Line:
        return cls(await Wire.connect(port))

    async def ask(self, number: int) -> None:
        self.numbers.append(number)
        await self.wire.send(http_request(number))

    async def rest(self) -> Counter[str]:
        """Read until the server ends the connection; return what became of the requests. Raises AssertionError: cut."""
        outcomes: Counter[str] = Counter()
        told = False
        for number in self.numbers:
            if told:
                outcomes["behind the last reply"] += 1
                continue
            reply = await self.wire.reply()
            told = reply.headers.get(b"connection") == b"close"
            if reply.status == 200:
                assert number_of_http(reply) == number
            outcomes[str(reply.status)] += 1
        assert await self.wire.rest() == b""
        return outcomes

    @property
    def sock(self) -> socket.socket:
        return self.wire._sock

    def close(self) -> None:
        self.wire.close()


class Clients:
    """UNDER_WAY requests, on connections of each kind, and some whose last byte has not been sent."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._ports = stack.port, int(stack.grpc.rpartition(":")[2])
        self._numbers = itertools.count(1)
        self.lines: list[Line] = []
        self.half_lines: list[tuple[Line, bytes]] = []
        self.channels: list[Channel] = []
        self.half_calls: list[tuple[Channel, int, int]] = []

    async def begin(self) -> None:
        for requests in (*[1] * PLAIN, *[PIPELINED] * PIPELINES):
            line = await Line.connect(self._ports[0])
            self.lines.append(line)
            for _ in range(requests):
                await line.ask(next(self._numbers))
        for port in self._ports:
            for at in range(CHANNELS):
                channel = await Channel.connect(port)
                self.channels.append(channel)
                for _ in range(STREAMS):
                    channel.call(next(self._numbers))
                if at < HALF // 2:
                    number = next(self._numbers)
                    self.half_calls.append((channel, channel.begin(number), number))
        for _ in range(HALF):
            line = await Line.connect(self._ports[0])
            line.numbers.append(next(self._numbers))
            whole = http_request(line.numbers[0])
            await line.wire.send(whole[:-1])
            self.half_lines.append((line, whole[-1:]))

    async def under_way(self) -> None:
        """Wait until the gateway has admitted all that it admits while the worker is stopped."""
        await asyncio.to_thread(wait_until, lambda: in_flight(self._stack) == ADMITTED, what="all are under way")

    async def ask_late(self) -> None:
        """Ask once more on each connection, and send what is missing of half requests."""
        for line in self.lines:
            await line.ask(next(self._numbers))
        for channel in self.channels:
            channel.call(next(self._numbers))
        for line, rest in self.half_lines:
            await line.wire.send(rest)
        for channel, stream, number in self.half_calls:
            channel.give(stream, number)

    @property
    def connections(self) -> list[Line | Channel]:
        return [*self.lines, *(line for line, _ in self.half_lines), *self.channels]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def in_flight(stack: Stack) -> float:
    return stack.metrics().value("millstream_requests_in_flight")


async def drained(stack: Stack) -> None:
    pids = stack.pids()
    clients = Clients(stack)
    try:
        with sigstopped(pids["cpu-0"]):
            await clients.begin()
            await clients.under_way()
            os.kill(pids["gateway-0"], signal.SIGTERM)
            for channel in clients.channels:
                await channel.client.until(lambda: bool(channel.client.goaways()))  # noqa: B023
            await clients.ask_late()
        outcomes: Counter[str] = Counter()
        for connection in clients.connections:
            outcomes += await connection.rest()
            connection.close()
    finally:
        clients.close()
    print(dict(outcomes))
    late = PLAIN + PIPELINES + 2 * CHANNELS
    assert outcomes.keys() <= ANSWERED | REFUSED
    assert sum(outcomes[kind] for kind in ANSWERED) >= UNDER_WAY + 2 * HALF
    assert outcomes.total() == UNDER_WAY + 2 * HALF + late


def test_a_gateway_that_drains_answers_what_it_has_and_cuts_nothing(stack: Stack) -> None:
    pid = stack.pids()["gateway-0"]
    asyncio.run(drained(stack))
    wait_until(lambda: stack.pids().get("gateway-0", pid) != pid, what="another gateway")
    stack.reconnect()
    wait_until(lambda: is_ready(stack), what="it is ready")


def is_ready(stack: Stack) -> bool:
    with suppress(httpx2.TransportError):
        return stack.http.get("/v2/health/ready").status_code == 200
    return False


def reset(connection: Line | Channel) -> None:
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.client.abort() if isinstance(connection, Channel) else connection.close()


def half_close(connection: Line | Channel) -> None:
    connection.sock.shutdown(socket.SHUT_WR)


def nothing_held(stack: Stack) -> bool:
    page = stack.metrics()
    names = ("requests_in_flight", "requests_receiving_bytes", "replies_unread_bytes")
    return not any(page.value(f"millstream_{name}") for name in names)


async def vanished(stack: Stack, vanish: Callable[[Line | Channel], None] | None) -> None:
    clients = Clients(stack)
    try:
        with sigstopped(stack.pids()["cpu-0"]):
            await clients.begin()
            await clients.under_way()
            if vanish is not None:
                for connection in clients.connections:
                    vanish(connection)
                await asyncio.to_thread(wait_until, lambda: nothing_held(stack), what="all places are given back")
        if vanish is None:
            # Half requests of clients that are there are still received, for as long as they may be slow.
            await asyncio.to_thread(wait_until, lambda: in_flight(stack) == 0, what="all are answered")
    finally:
        clients.close()
    await asyncio.to_thread(wait_until, lambda: nothing_held(stack), what="nothing is held")


@pytest.mark.parametrize("vanish", [reset, half_close, None], ids=["reset", "half-close", "silence"])
def test_clients_that_vanish_give_their_places_back(
    stack: Stack, vanish: Callable[[Line | Channel], None] | None
) -> None:
    asyncio.run(vanished(stack, vanish))


async def waves(stack: Stack, load: Load) -> None:
    for _ in range(WAVES):
        clients = Clients(stack)
        try:
            await clients.begin()
            for at, connection in enumerate(clients.connections):
                [reset, half_close, lambda _: None][at % 3](connection)
            await asyncio.to_thread(load.more, CALLERS)
        finally:
            clients.close()


def test_clients_that_vanish_under_load_cost_nobody_an_answer(stack: Stack) -> None:
    x = np.full((1, COLUMNS), 7, np.float32)
    with constant_load(stack.port, PATH, [v2.request({"x": x}, parameters=PATIENT)], CALLERS) as load:
        asyncio.run(waves(stack, load))
    assert {answer.status for answer in load.answers} == {200}
    wait_until(lambda: nothing_held(stack), what="nothing is held")
