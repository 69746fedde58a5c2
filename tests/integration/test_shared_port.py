"""HTTP/1.1 and gRPC on one port (MILLSTREAM_GRPC_PORT is that of HTTP), in process, and in an installation over TLS."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from hpack import Encoder
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from uvicorn import Server

from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.grpc.connections.message_framing import prefix
from millstream.gateway.grpc.server import GrpcServer
from millstream.gateway.http2 import frames
from millstream.gateway.http2.frames import frame
from millstream.gateway.listeners import shared_port_protocol
from tests.kit import models
from tests.kit.application import Application
from tests.kit.certificates import Authority
from tests.kit.handlers import Echo
from tests.kit.http2_peer import GREETING, PlainReader
from tests.kit.ports import free_port
from tests.kit.stack import Stack, running_stack
from tests.kit.tools import program
from tests.kit.wire import post, request, serving

WAIT_S = 120.0
CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ServerLive"),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
ALIVE = request("GET", "/v2/health/live", "Connection: close")
#: a whole gRPC call, from the first byte of its connection
FIRST_CALL = b"".join(
    (
        GREETING,
        frame(frames.HEADERS, frames.END_HEADERS, 1, Encoder().encode(CALL)),
        frame(frames.DATA, frames.END_STREAM, 1, prefix(0)),
    )
)


class Shared(NamedTuple):
    """A port of both, with both servers."""

    port: int
    http: Server
    grpc: GrpcServer


@asynccontextmanager
async def shared(home: Path, **options: Any) -> AsyncIterator[Shared]:
    application = Application(home, grpc_port=8000, http_port=8000)
    server = GrpcServer(application.app.state.deps, Drain(), shared=False)
    await server.start()
    lane = fast_path_protocol(Echo(), 65536, 100, ReceiveBudget(1 << 24), ReplyBudget(1 << 30))
    assert server.http2 is not None
    async with serving(application.app, shared_port_protocol(lane, server.http2), **options) as http:
        yield Shared(http.port, http.server, server)
        await server.close()
    await until(lambda: not server.connections)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


class Wire:
    """A client of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def send(self, *segments: bytes) -> None:
        """Send each segment in its own packet, as far as a sender can."""
        for segment in segments:
            self._writer.write(segment)
            await self._writer.drain()

    async def rest(self) -> bytes:
        """Return all that the server sends until it closes."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


async def replies(wire: Wire) -> list[frames.Frame]:
    """Return the frames up to the end of the reply to stream 1."""
    reader, found = PlainReader(), list[frames.Frame]()
    async with asyncio.timeout(WAIT_S):
        while not any(flags & frames.END_STREAM for kind, flags, _, _ in found if kind == frames.HEADERS):
            data = await wire.reader.read(65536)
            assert data, found
            reader.read(data, found)
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("cuts", [[], [1], [3], [14], [16], [23], [24], [25], list(range(1, 40))], ids=str)
async def test_a_call_is_answered_wherever_its_first_bytes_are_cut(tmp_path: Path, cuts: list[int]) -> None:
    segments = [FIRST_CALL[a:b] for a, b in zip([0, *cuts], [*cuts, len(FIRST_CALL)], strict=True)]
    async with shared(tmp_path) as (port, http, server), connected(port) as wire:
        await wire.send(*segments)
        found = await replies(wire)
        assert [payload for kind, _, _, payload in found if kind == frames.DATA] == [prefix(2) + b"\x08\x01"]
        assert (server.connections, len(http.server_state.connections)) == (1, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("cut", [0, 1, 2, 10, 40])
async def test_requests_of_http_1_are_answered_as_without_the_other(tmp_path: Path, cut: int) -> None:
    sent = post("/v2/models/m/infer", b'{"inputs":[]}', "Content-Type: application/json")
    async with shared(tmp_path) as (port, _, server), connected(port) as wire:
        await wire.send(*filter(None, (sent[:cut], sent[cut:])), ALIVE)
        said = await wire.rest()
        assert said.count(b"HTTP/1.1 200") == 2
        assert server.connections == 0


@pytest.mark.anyio
async def test_what_only_begins_like_http_2_is_refused_as_http_1(tmp_path: Path) -> None:
    async with shared(tmp_path) as (port, _, server), connected(port) as wire:
        await wire.send(b"PRI", b" * HTTP/2.0\r\n\r\nno")
        assert (await wire.rest()).startswith(b"HTTP/1.1 400")
        assert server.connections == 0


@pytest.mark.anyio
async def test_a_connection_that_does_not_say_what_it_is_ends_with_the_idle_timeout(tmp_path: Path) -> None:
    async with shared(tmp_path, timeout_keep_alive=1) as (port, http, _), connected(port) as wire:
        await wire.send(b"PRI * ")
        async with asyncio.timeout(WAIT_S):
            await wire.rest()
        assert not http.server_state.connections


@pytest.mark.anyio
async def test_a_drain_ends_calls_of_the_shared_port_in_two_steps(tmp_path: Path) -> None:
    async with shared(tmp_path) as (port, _, server):
        async with connected(port) as old:
            await old.send(FIRST_CALL)
            await replies(old)
            draining = asyncio.create_task(server.drain(asyncio.get_running_loop().time() + WAIT_S))
            assert b"\x07" in await old.reader.read(65536)  # GOAWAY
            await old.rest()
        async with connected(port) as late:  # accepted while the server drains
            await late.send(FIRST_CALL)
            kinds = [kind for kind, *_ in await replies(late)]
            assert frames.GOAWAY in kinds
            assert frames.DATA in kinds
            await late.rest()
        async with asyncio.timeout(WAIT_S):
            await draining


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(tmp_path_factory.mktemp("authority"))
    pair = authority.issue()
    settings = {
        **dict.fromkeys(("http_port", "grpc_port"), free_port()),
        "ca_file": authority.certificate,
        "tls_cert_file": pair.certificate,
        "tls_key_file": pair.key,
    }
    with running_stack(folder, settings=settings) as stack:
        stack.push("m", models.identity(folder / "m.onnx"))
        yield stack, authority.certificate


@pytest.mark.needs("openssl")
def test_grpc_over_tls_on_the_http_port(secure: tuple[Stack, Path]) -> None:
    stack, roots = secure
    data = np.arange(4, dtype=np.float32).reshape(2, 2)
    given = triton.InferInput("x", [2, 2], "FP32")
    given.set_data_from_numpy(data)
    for port in (stack.port, int(stack.grpc.rpartition(":")[2])):
        with triton.InferenceServerClient(f"localhost:{port}", ssl=True, root_certificates=str(roots)) as client:
            np.testing.assert_array_equal(client.infer("m", [given]).as_numpy("y"), data)
        credentials = grpc.ssl_channel_credentials(roots.read_bytes())
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            live = service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=WAIT_S)
            assert live.live


@pytest.mark.needs("openssl", "curl")
@pytest.mark.parametrize("offer", ["--http2", "--http1.1"])
def test_a_client_that_speaks_both_gets_http_1_over_tls(secure: tuple[Stack, Path], offer: str) -> None:
    stack, roots = secure
    command = [program("curl"), offer, "--silent", "--show-error", "--max-time", "200", "--cacert", str(roots)]
    command += ["--output", "/dev/null", "--write-out", "%{http_version} %{http_code}"]
    done = subprocess.run([*command, f"https://localhost:{stack.port}/v2"], capture_output=True, text=True, check=True)
    assert done.stdout == "1.1 200"
