"""The gRPC server: beside the library's server, and by hand-written frames."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2
from hpack import Decoder, Encoder
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.connection.drain import Drain
from millstream.gateway.grpc import server as grpc_server
from millstream.gateway.grpc.connections import fast_connection, message_framing
from millstream.gateway.grpc.connections.fast_call import FastCall
from millstream.gateway.grpc.connections.message_framing import prefix
from millstream.gateway.grpc.server import GrpcServer
from millstream.gateway.http2 import frames
from millstream.gateway.http2.connection import TURN_WORK_MAX, Http2Connection
from millstream.gateway.http2.events import ErrorCode
from millstream.gateway.http2.frames import Frame, Setting, frame
from millstream.services.metrics.catalogue import GRPC_CALLS
from tests.kit.application import Application
from tests.kit.grpc_library import LibraryServer
from tests.kit.http2_peer import GREETING, PlainReader

WAIT_S = 120.0
SERVICE = "/inference.GRPCInferenceService/"
INFER = pb.ModelInferRequest(model_name="nothing")
CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", f"{SERVICE}ServerLive"),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
EMPTY = prefix(0)


class Served(NamedTuple):
    """An application, which no worker serves, behind the server."""

    application: Application
    server: GrpcServer
    drain: Drain


@asynccontextmanager
async def served(home: Path, **settings: object) -> AsyncIterator[Served]:
    application = Application(home, grpc_port=0, **settings)
    drain = Drain()
    server = GrpcServer(application.app.state.deps, drain, shared=False)
    await server.start()
    try:
        yield Served(application, server, drain)
    finally:
        await server.close()
    await until(lambda: not server.connections)
    assert application.receive_budget.bytes == 0
    assert application.reply_budget.bytes == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


class Client:
    """A client of hand-written frames. `fields`: by stream, the header fields received; `data`: the bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = PlainReader()
        self._encoder, self._decoder = Encoder(), Decoder()
        self.received: list[Frame] = []
        self.fields: dict[int, dict[str, str]] = {}
        self.data: dict[int, bytes] = {}
        self.ended: dict[int, int | None] = {}  # by stream: the code of its reset; None: it ended as it should
        self.closed = False

    def send(self, *parts: bytes) -> None:
        self._writer.write(b"".join(parts))

    def begin(self, stream: int, headers: list[tuple[str, str]] | None = None, *, end: bool = False) -> None:
        flags = frames.END_HEADERS | (frames.END_STREAM if end else 0)
        self.send(frame(frames.HEADERS, flags, stream, self._encoder.encode(headers or CALL)))

    def give(self, stream: int, data: bytes, *, end: bool = True) -> None:
        self.send(frame(frames.DATA, frames.END_STREAM if end else 0, stream, data))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until `condition` is true or the server closes."""
        async with asyncio.timeout(WAIT_S):
            while not condition() and not self.closed:
                found: list[Frame] = []
                data = b""
                with suppress(ConnectionError):
                    self._frames.read(data := await self._reader.read(1 << 16), found)
                self.closed = not data
                for one in found:
                    self._note(*one)
        assert condition()

    def _note(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.received.append((kind, flags, stream, payload))
        if kind == frames.HEADERS:
            fields: Any = self._decoder.decode(payload)
            self.fields.setdefault(stream, {}).update(fields)
        elif kind == frames.DATA:
            self.data[stream] = self.data.get(stream, b"") + payload
        elif kind == frames.RST_STREAM:
            self.ended.setdefault(stream, int.from_bytes(payload))
        elif kind in {frames.PING, frames.SETTINGS} and not flags & frames.ACK:
            self.send(frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))
        if kind in {frames.HEADERS, frames.DATA} and flags & frames.END_STREAM:
            self.ended[stream] = None

    async def reply(self, stream: int) -> dict[str, str]:
        """Return the header fields of a reply, when it has ended."""
        await self.until(lambda: stream in self.ended)
        return self.fields[stream]

    def goaways(self) -> list[tuple[int, int]]:
        """Return (last stream, code) of each GOAWAY."""
        return [
            (int.from_bytes(payload[:4]), int.from_bytes(payload[4:8]))
            for kind, _, _, payload in self.received
            if kind == frames.GOAWAY
        ]

    def reset(self, stream: int) -> None:
        self.send(frame(frames.RST_STREAM, 0, stream, int(ErrorCode.CANCEL).to_bytes(4)))

    def abort(self) -> None:
        """Close without another word, and forget what was not sent."""
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(server: GrpcServer | LibraryServer) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", server.port))
    client.send(GREETING)
    try:
        yield client
    finally:
        client.close()


def to(method: str) -> list[tuple[str, str]]:
    """Return the header fields of a call of a method of the inference service."""
    return [*CALL[:2], (":path", f"{SERVICE}{method}"), *CALL[3:]]


#: unary calls, with what the application behind both servers answers or refuses
CALLS: list[tuple[str, Any, Any]] = [
    ("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse),
    ("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse),
    ("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse),
    ("ModelReady", pb.ModelReadyRequest(name="nothing"), pb.ModelReadyResponse),
    ("ModelReady", pb.ModelReadyRequest(name="nothing", version="x"), pb.ModelReadyResponse),
    ("ModelMetadata", pb.ModelMetadataRequest(name="nothing"), pb.ModelMetadataResponse),
    ("ModelConfig", pb.ModelConfigRequest(name="nothing"), pb.ModelConfigResponse),
    ("ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse),
    ("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="nothing"), pb.RepositoryModelLoadResponse),
    ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(), pb.SystemSharedMemoryStatusResponse),
    ("TraceSetting", pb.TraceSettingRequest(), pb.TraceSettingResponse),
    ("LogSettings", pb.LogSettingsRequest(), pb.LogSettingsResponse),
    ("ModelInfer", INFER, pb.ModelInferResponse),
    ("ModelInfer", pb.ModelInferRequest(model_name="ü" * 3000), pb.ModelInferResponse),
    ("NoSuchMethod", pb.ServerLiveRequest(), pb.ServerLiveResponse),
]


async def outcome(channel: grpc.aio.Channel, method: str, request: Any, response: Any) -> tuple[Any, ...]:
    """Return what a client sees of a call: its reply, or status, details and trailing metadata but the request id."""
    call = channel.unary_unary(f"{SERVICE}{method}", type(request).SerializeToString, response.FromString)(
        request, metadata=[("x-request-id", "mine")]
    )
    try:
        return (await call, tuple(await call.trailing_metadata()))
    except grpc.aio.AioRpcError as error:
        return (error.code(), error.details(), tuple(error.trailing_metadata()))


@pytest.mark.anyio
async def test_both_servers_answer_each_call_alike(tmp_path: Path) -> None:
    async with served(tmp_path) as (application, fast, drain):
        library = LibraryServer(application.app.state.deps, drain, shared=False)
        await library.start()
        answers: list[list[Any]] = []
        counts = [application.registry.counts(GRPC_CALLS)]
        for port in (library.port, fast.port):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                answers.append([await outcome(channel, *call) for call in CALLS])
                answers[-1].append([one async for one in stream(channel)])
            # The library counts a call after its client has the status.
            expected = len(counts) * (len(CALLS) + 2)
            await until(lambda: sum(application.registry.counts(GRPC_CALLS).values()) == expected)  # noqa: B023
            counts.append(application.registry.counts(GRPC_CALLS))
        await library.close()
        for call, ours, theirs in zip([*CALLS, "stream"], answers[1], answers[0], strict=True):
            assert ours == theirs, call
        assert sum(counts[1].values()) == len(CALLS) + 2
        assert counts[2] == {labels: 2 * count for labels, count in counts[1].items()}


async def stream(channel: grpc.aio.Channel) -> AsyncIterator[Any]:
    call = channel.stream_stream(
        f"{SERVICE}ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    async for reply in call(iter([INFER, INFER])):
        yield reply
    yield await call(iter([])).code()


@pytest.mark.anyio
async def test_health_watch_ends_when_the_gateway_drains(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (_, server, drain),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        drain.draining = True
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


def changed(**changes: str) -> list[tuple[str, str]]:
    return [*({**dict(CALL), **{name.replace("_", "-"): value for name, value in changes.items()}}).items()]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param(changed(content_type="text/plain"), {":status": "415"}, id="content type"),
        pytest.param([(":method", "GET"), *CALL[1:]], {":status": "405"}, id="method"),
        pytest.param(changed(grpc_timeout="soon"), {"grpc-status": "13"}, id="timeout"),
        pytest.param(
            changed(grpc_encoding="zstd"),
            {"grpc-status": "12", "grpc-accept-encoding": "identity, deflate, gzip"},
            id="encoding",
        ),
        pytest.param(changed(x="y" * 17_000), {"grpc-status": "8"}, id="metadata over the limit"),
        pytest.param([*CALL[:2], (":path", "/no.Service/Method"), *CALL[3:]], {"grpc-status": "12"}, id="service"),
    ],
)
async def test_what_is_no_call_is_refused_with_headers_alone(tmp_path: Path, headers: Any, expected: Any) -> None:
    async with served(tmp_path) as (_, server, _), connected(server) as client:
        client.send(*header_frames(client, headers))
        fields = await client.reply(1)
        assert fields.items() >= expected.items()
        assert client.data == {}
        client.begin(3)  # the connection is in order
        client.give(3, EMPTY)
        assert (await client.reply(3))["grpc-status"] == "0"


def header_frames(client: Client, headers: list[tuple[str, str]]) -> list[bytes]:
    """Return a call as HEADERS and CONTINUATION: its header block may be longer than a frame."""
    block = client._encoder.encode(headers, huffman=False)
    return [
        frame(frames.HEADERS, 0, 1, block[:16384]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[16384:]),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["ServerLive", "ModelInfer"])
async def test_a_unary_call_without_a_message_is_refused(tmp_path: Path, method: str) -> None:
    async with served(tmp_path) as (_, server, _), connected(server) as client:
        client.begin(1, to(method), end=True)
        client.begin(3, to(method))
        client.give(3, b"")
        for stream in (1, 3):
            assert (await client.reply(stream))["grpc-status"] == "3"


@pytest.mark.anyio
async def test_an_infer_call_that_is_submitted_needs_no_handler(tmp_path: Path) -> None:
    async with served(tmp_path) as (application, server, _), connected(server) as client:
        taken: list[bytes | memoryview] = []

        def submit(call: FastCall) -> bool:
            taken.append(call.take_message())
            call.answer(b"reply", message_framing.ok_trailers(b"some-id"))
            return True

        server._parts.infer = submit
        client.begin(1, to("ModelInfer"))
        for byte in prefix(7) + b"message":
            client.give(1, bytes((byte,)), end=False)
        fields = await client.reply(1)
        assert (fields["grpc-status"], fields["x-request-id"]) == ("0", "some-id")
        assert (taken, client.data[1]) == ([b"message"], prefix(5) + b"reply")
        assert sum(application.registry.counts(GRPC_CALLS).values()) == 0  # the handler counts its calls


@pytest.mark.anyio
@pytest.mark.parametrize("metadata", [{}, {"x-request-id": "mine"}], ids=["plain", "with a request id"])
async def test_an_infer_call_that_is_not_submitted_has_its_handler(tmp_path: Path, metadata: dict[str, str]) -> None:
    message = INFER.SerializeToString()
    async with served(tmp_path) as (_, server, _), connected(server) as client:
        offered: list[FastCall] = []

        def submit(call: FastCall) -> bool:
            offered.append(call)
            return False

        server._parts.infer = submit
        client.begin(1, [*to("ModelInfer"), *metadata.items()])
        client.give(1, prefix(len(message)) + message)
        assert (await client.reply(1))["grpc-status"] == "5"
        assert len(offered) == (0 if metadata else 1)


@pytest.mark.anyio
async def test_a_message_may_come_byte_by_byte(tmp_path: Path) -> None:
    message = pb.ModelReadyRequest(name="nothing").SerializeToString()
    async with served(tmp_path) as (_, server, _), connected(server) as client:
        client.begin(1, to("ModelReady"))
        for byte in prefix(len(message)) + message:
            client.give(1, bytes((byte,)), end=False)
        client.give(1, b"")
        assert (await client.reply(1))["grpc-status"] == "0"
        assert client.data[1] == prefix(0)


@pytest.mark.anyio
async def test_a_flood_of_tiny_frames_is_read_in_turns_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    rest = Http2Connection.receive_rest

    def counted(connection: Http2Connection[Any], now: float) -> Any:
        nonlocal turns
        turns += 1
        return rest(connection, now)

    message = pb.ModelReadyRequest(name="n" * 20_000).SerializeToString()
    monkeypatch.setattr(Http2Connection, "receive_rest", counted)
    async with served(tmp_path) as (_, server, _), connected(server) as client:
        client.begin(1, to("ModelReady"))
        client.send(*[frame(frames.DATA, 0, 1, bytes((byte,))) for byte in prefix(len(message)) + message])
        client.give(1, b"")
        assert (await client.reply(1))["grpc-status"] == "0"
        assert turns >= 20_000 // TURN_WORK_MAX


@pytest.mark.anyio
async def test_a_compressed_message_without_its_encoding_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, server, _), connected(server) as client:
        client.begin(1)
        client.give(1, prefix(3, compressed=True) + b"abc")
        assert (await client.reply(1))["grpc-status"] == "13"


@pytest.mark.anyio
async def test_a_message_over_the_limit_is_refused_before_it_comes(tmp_path: Path) -> None:
    async with served(tmp_path, request_bytes_max=100_000) as (_, server, _), connected(server) as client:
        client.begin(1)
        client.give(1, prefix(100_001), end=False)
        fields = await client.reply(1)
        assert fields["grpc-status"] == "8"
        assert "larger%20than%20max" in fields["grpc-message"] or "larger than max" in fields["grpc-message"]


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["ServerLive", "ModelInfer"])
async def test_a_request_that_comes_too_slowly_ends(tmp_path: Path, method: str) -> None:
    async with served(tmp_path, client_stall_s_max=0.1) as (_, server, _), connected(server) as client:
        client.begin(1, to(method))
        client.give(1, prefix(100), end=False)
        assert (await client.reply(1))["grpc-status"] == "4"


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["ServerLive", "ModelInfer", "ModelStreamInfer"])
async def test_a_call_over_the_receive_budget_is_refused(tmp_path: Path, method: str) -> None:
    limits = {"inflight_bytes_max": 70_000, "request_bytes_max": 1 << 20}
    async with served(tmp_path, **limits) as (application, server, _), connected(server) as client:
        client.begin(1, to(method))
        client.give(1, prefix(200_000), end=False)
        for _ in range(8):
            client.give(1, bytes(16_000), end=False)
        assert (await client.reply(1))["grpc-status"] == "14"
        await until(lambda: application.receive_budget.bytes == 0)


@pytest.mark.anyio
async def test_a_call_whose_deadline_passes_ends(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, server, _), connected(server) as client:
        client.begin(1, [*CALL[:2], (":path", "/grpc.health.v1.Health/Watch"), *CALL[3:], ("grpc-timeout", "50m")])
        client.give(1, EMPTY)
        assert (await client.reply(1))["grpc-status"] == "4"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "message", "status"),
    [("NoSuchMethod", b"", "12"), ("ServerLive", b"\0" + b"\xff" * 4, "8"), ("ModelInfer", b"\0" + b"\xff" * 4, "8")],
    ids=["method", "message", "message of an infer call"],
)
async def test_a_call_that_was_answered_early_gets_no_second_reply(
    tmp_path: Path, method: str, message: bytes, status: str
) -> None:
    async with served(tmp_path, client_stall_s_max=0.1) as (_, server, _), connected(server) as client:
        client.begin(1, [*to(method), ("grpc-timeout", "100m")])
        client.give(1, message, end=False)
        assert (await client.reply(1))["grpc-status"] in {status, "4"}  # 4: the machine was slow
        client.give(1, b"x", end=False)
        client.begin(3)  # its message never comes: it ends by the limit that call 1 would have reached first
        assert (await client.reply(3))["grpc-status"] == "4"
        assert [stream for kind, _, stream, _ in client.received if kind == frames.HEADERS] == [1, 3]


@pytest.mark.anyio
async def test_a_reset_cancels_its_call(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, server, _), connected(server) as client:
        client.begin(1, [*CALL[:2], (":path", "/grpc.health.v1.Health/Watch"), *CALL[3:]])
        client.give(1, EMPTY)
        await client.until(lambda: 1 in client.data)
        assert server.calls == 1
        client.send(frames.reset(1, ErrorCode.CANCEL))
        await until(lambda: server.calls == 0)


@pytest.mark.anyio
async def test_a_client_that_gives_no_window_loses_its_stream_alone(tmp_path: Path) -> None:
    async with served(tmp_path, client_stall_s_max=0.1) as (_, server, _), connected(server) as client:
        client.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
        client.begin(1)
        client.give(1, EMPTY)
        await client.until(lambda: 1 in client.ended)
        assert client.ended[1] == ErrorCode.ENHANCE_YOUR_CALM
        client.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 65535}))
        client.begin(3)
        client.give(3, EMPTY)
        assert (await client.reply(3))["grpc-status"] == "0"


@pytest.mark.anyio
async def test_the_oldest_of_too_many_half_open_calls_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CROWDED_S_MIN", 0.0)
    async with served(tmp_path, inflight_requests_max=1) as (_, server, _), connected(server) as client:
        half = server.reads_max
        for number in range(half + 1):
            client.begin(2 * number + 1)
        assert (await client.reply(1))["grpc-status"] == "14"
        await until(lambda: server.calls == half)


@pytest.mark.anyio
async def test_a_connection_over_the_limit_is_closed(tmp_path: Path) -> None:
    async with served(tmp_path, client_connections_max=1) as (_, server, _), connected(server) as first:
        first.begin(1)
        first.give(1, EMPTY)
        await first.reply(1)
        async with connected(server) as second:
            await second.until(lambda: second.closed)
        first.begin(3)
        first.give(3, EMPTY)
        assert (await first.reply(3))["grpc-status"] == "0"


@pytest.mark.anyio
async def test_a_connection_is_drained_at_its_age_and_its_calls_are_answered(tmp_path: Path) -> None:
    async with served(tmp_path, drain_s=1) as (_, server, _), connected(server) as client:
        client.begin(1)  # whose message comes behind the first step
        await client.until(lambda: len(client.goaways()) == 2)
        assert client.goaways() == [((1 << 31) - 1, 0), (1, 0)]
        client.give(1, EMPTY)
        assert (await client.reply(1))["grpc-status"] == "0"
        await client.until(lambda: client.closed)


@pytest.mark.anyio
async def test_a_drain_closes_idle_connections_and_waits_for_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These clients never close."""
    monkeypatch.setattr(fast_connection, "LINGER_S", 0.05)
    async with served(tmp_path) as (_, server, _), connected(server) as idle, connected(server) as busy:
        busy.begin(1)
        busy.begin(3)
        busy.give(3, EMPTY)
        await busy.reply(3)
        loop = asyncio.get_running_loop()
        draining = asyncio.create_task(server.drain(loop.time() + WAIT_S))
        await idle.until(lambda: idle.closed)
        await busy.until(lambda: len(busy.goaways()) == 2)
        assert not draining.done()
        busy.give(1, EMPTY)
        assert (await busy.reply(1))["grpc-status"] == "0"
        await busy.until(lambda: busy.closed)
        await draining


@pytest.mark.anyio
async def test_a_drain_does_not_cut_a_reply_that_its_client_is_reading(tmp_path: Path) -> None:
    """While it reads it gives window: a socket that is closed for reading would answer with a reset."""
    body, wide = bytes(300_000), (1 << 24).to_bytes(4)
    async with served(tmp_path) as (_, server, _):
        calls: list[FastCall] = []

        def submit(call: FastCall) -> bool:
            call.take_message()
            calls.append(call)
            return True

        server._parts.infer = submit
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", server.port))
        client = Client(*await asyncio.open_connection(sock=sock))
        window = int(Setting.INITIAL_WINDOW_SIZE).to_bytes(2) + wide
        client.send(GREETING, frame(frames.SETTINGS, 0, 0, window), frame(frames.WINDOW_UPDATE, 0, 0, wide))
        client.begin(1, to("ModelInfer"))
        client.give(1, prefix(1) + b"x")
        await until(lambda: bool(calls))
        draining = asyncio.create_task(server.drain(loop.time() + WAIT_S))
        await client.until(lambda: len(client.goaways()) == 2)
        [connection] = server._parts.connections
        # All of the reply fits into the kernel, so that nothing but the client keeps the connection.
        connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        calls[0].answer(body, message_framing.ok_trailers(b"id"))
        await until(lambda: connection.h2.drained)
        for _ in range(100):  # turns of the event loop, in which a connection that is not kept is closed
            await asyncio.sleep(0)
        client.send(frame(frames.WINDOW_UPDATE, 0, 0, (1).to_bytes(4)))
        assert (await client.reply(1))["grpc-status"] == "0"
        assert client.data[1] == prefix(len(body)) + body
        await client.until(lambda: client.closed)
        client.close()
        await draining


@pytest.mark.anyio
async def test_what_is_not_http2_is_closed(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert b"HTTP/2" in await reader.read()
        writer.close()
