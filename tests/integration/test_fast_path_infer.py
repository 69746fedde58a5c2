"""The gateway's own handler behind the fast path and behind the ASGI route: the same bytes in, the same bytes out."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import orjson
import pytest

import millstream.gateway.v2.service
from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import SMALL_BYTES_MAX, ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.connection.infer_handler import HttpReply, InferHeaders
from millstream.gateway.v2.responder import RestResponder
from millstream.gateway.v2.service import InferService
from tests.kit.application import Application
from tests.kit.loopback import Loopback
from tests.kit.wire import PATIENCE_S, Served, Wire, WireReply, chunked, post, serving, until

pytestmark = pytest.mark.anyio
BODY_BYTES_MAX = 1 << 20
PATH = "/v2/models/m/infer"


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def loopback(tmp_path_factory: pytest.TempPathFactory) -> Loopback:
    loopback = Loopback(tmp_path_factory.mktemp("home"), request_bytes_max=BODY_BYTES_MAX)
    await loopback.open()
    return loopback


@pytest.fixture(scope="module")
async def servers(loopback: Loopback) -> AsyncIterator[tuple[Served, Served]]:
    """The fast path, and plain uvicorn."""
    application = Application(loopback.settings.home, request_bytes_max=BODY_BYTES_MAX)
    app = build_app(dataclasses.replace(application.app.state.deps, infer=loopback.infer))
    lane = fast_path_protocol(loopback.infer, BODY_BYTES_MAX, 100, ReceiveBudget(1 << 26), ReplyBudget(1 << 30))
    async with serving(app, lane) as fast, serving(app, "httptools") as plain:
        yield fast, plain


def rows(count: int) -> list[list[float]]:
    return np.arange(4 * count, dtype=np.float32).reshape(-1, 4).tolist()


def json_body(count: int = 1, **more: object) -> bytes:
    inputs = [{"name": "x", "shape": [count, 4], "datatype": "FP32", "data": rows(count)}]
    return orjson.dumps({"inputs": inputs, **more})


def binary(count: int) -> tuple[bytes, str]:
    """A body with its tensor in binary, and the header that says where it begins."""
    data = np.array(rows(count), np.float32).tobytes()
    tensor = {"name": "x", "shape": [count, 4], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    head = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    return head + data, f"Inference-Header-Content-Length: {len(head)}"


def packed(pack: Callable[[bytes], bytes], encoding: str, count: int, *headers: str) -> bytes:
    return post(PATH, pack(json_body(count)), f"Content-Encoding: {encoding}", *headers)


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


BINARY, BINARY_HEADER = binary(3)
BIG, BIG_HEADER = binary(20_000)

CASES = {
    "json": (200, post(PATH, json_body())),
    "json with an id": (200, post(PATH, json_body(2, id="seven"))),
    "binary": (200, post(PATH, BINARY, BINARY_HEADER)),
    "a large binary": (200, post(PATH, BIG, BIG_HEADER)),
    "chunks": (200, chunked(PATH, [json_body()[i : i + 7] for i in range(0, len(json_body()), 7)])),
    "version": (200, post("/v2/models/m/versions/1/infer", json_body())),
    "gzip in": (200, packed(gzipped, "gzip", 3)),
    "deflate in": (200, packed(zlib.compress, "Deflate", 3)),
    "identity in": (200, post(PATH, json_body(), "Content-Encoding: identity")),
    "gzip out": (200, post(PATH, json_body(900), "Accept-Encoding: gzip, deflate")),
    "deflate out": (200, post(PATH, json_body(900), "Accept-Encoding: deflate")),
    "large, gzip out": (200, post(PATH, json_body(9000), "Accept-Encoding: gzip")),
    "gzip both ways, binary": (
        200,
        post(PATH, gzipped(BIG), BIG_HEADER, "Content-Encoding: gzip", "Accept-Encoding: gzip"),
    ),
    "small, not worth it": (200, post(PATH, json_body(), "Accept-Encoding: gzip")),
    "an encoding that is not spoken": (415, post(PATH, json_body(), "Content-Encoding: br")),
    "no gzip at all": (400, post(PATH, json_body(), "Content-Encoding: gzip")),
    "cut gzip": (400, post(PATH, gzipped(json_body(90))[:-9], "Content-Encoding: gzip")),
    "a zip bomb": (413, post(PATH, gzipped(bytes(BODY_BYTES_MAX + 1)), "Content-Encoding: gzip")),
    "unknown model": (404, post("/v2/models/nope/infer", json_body())),
    "unknown model, compressed": (
        404,
        post("/v2/models/nope/infer", gzipped(json_body()), "Content-Encoding: gzip"),
    ),
    "version with zeros": (200, post("/v2/models/m/versions/0001/infer", json_body())),
    "unknown version": (404, post("/v2/models/m/versions/2/infer", json_body())),
    "bad version": (404, post("/v2/models/m/versions/one/infer", json_body())),
    "no active version": (404, post("/v2/models/idle/infer", json_body())),
    "bad json": (400, post(PATH, b'{"inputs":')),
    "json that is no object": (400, post(PATH, b"[]")),
    "empty": (400, post(PATH)),
    "header length that is no number": (400, post(PATH, BINARY, "Inference-Header-Content-Length: x")),
    "header length below 0": (400, post(PATH, BINARY, "Inference-Header-Content-Length: -1")),
    "header length beyond the body": (400, post(PATH, BINARY, "Inference-Header-Content-Length: 99999")),
    "wrong shape": (400, post(PATH, json_body().replace(b"[1,4]", b"[1,5]"))),
    "HTTP/1.0": (200, post(PATH, json_body(), version="1.0")),
    "close": (200, post(PATH, json_body(), "Connection: close")),
    "too long": (413, post(PATH, bytes(BODY_BYTES_MAX + 1))),
}


async def exchange(port: int, *requests: bytes) -> list[WireReply]:
    """Each request on the same connection, after the reply to the one before it."""
    replies = []
    async with await Wire.connect(port) as wire:
        for request in requests:
            await wire.send(request)
            replies.append(await wire.reply())
    return replies


@pytest.mark.parametrize("case", CASES)
async def test_same_replies(servers: tuple[Served, Served], loopback: Loopback, case: str) -> None:
    status, request = CASES[case]
    (fast,), (plain,) = [await exchange(server.port, request) for server in servers]
    for reply in (fast, plain):
        reply.headers.pop(b"x-request-id", None)
    assert fast == plain
    assert fast.status == status
    assert (loopback.admission.requests, loopback.admission.bytes) == (0, 0)


async def test_right_numbers(servers: tuple[Served, Served]) -> None:
    for server in servers:
        as_json, as_binary, as_gzip, as_chunks = await exchange(
            server.port,
            CASES["json"][1],
            CASES["binary"][1],
            CASES["large, gzip out"][1],
            CASES["chunks"][1],
        )
        assert orjson.loads(as_json.body)["outputs"][0]["data"] == [0.0, 2.0]
        head = int(as_binary.headers[b"inference-header-content-length"])
        assert np.frombuffer(as_binary.body[head:], np.float32).tolist() == [0, 2, 8, 10, 16, 18]
        assert as_gzip.headers[b"content-encoding"] == b"gzip"
        assert orjson.loads(gzip.decompress(as_gzip.body))["outputs"][0]["shape"] == [9000, 2]
        assert as_chunks.body == as_json.body


async def test_a_client_that_leaves_takes_its_request_out_of_the_lane(
    servers: tuple[Served, Served], loopback: Loopback
) -> None:
    loopback.link.held = True
    lane = loopback.lanes.routes["m", None].lane
    for server in servers:
        for request in (CASES["json"][1], CASES["gzip in"][1]):
            async with await Wire.connect(server.port) as wire:
                await wire.send(request)
                await until(lambda: loopback.admission.requests == 1)
            await until(lambda: loopback.admission.requests == 0)
            await server.settled(0)
    loopback.link.held = False
    loopback.link.run_held()
    await until(lambda: lane.idle)


async def test_a_client_that_leaves_while_its_body_is_unpacked_is_not_served(
    servers: tuple[Served, Served], loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    for server in servers:
        begun, left = asyncio.Event(), asyncio.Event()

        def slow(*_: object, begun: asyncio.Event = begun, left: asyncio.Event = left) -> bytes:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(left.wait(), loop).result(PATIENCE_S)
            return json_body()

        monkeypatch.setattr(millstream.gateway.v2.service, "decompress", slow)
        async with await Wire.connect(server.port) as wire:
            await wire.send(CASES["gzip in"][1])
            await asyncio.wait_for(begun.wait(), 120)
        await server.settled(0)
        left.set()
        await until(lambda: not loopback.infer._tasks)
        assert loopback.admission.requests == 0
        assert not loopback.link.waiting
        assert loopback.receive_budget.bytes == 0


async def test_compressed_bodies_that_wait_take_from_the_receive_budget(loopback: Loopback) -> None:
    body = gzip.compress(json_body() + b" " * SMALL_BYTES_MAX, compresslevel=0)
    loopback.receive_budget.bytes_max = 2 * len(body)
    replies: list[HttpReply] = []
    for _ in range(3):
        loopback.infer.submit("m", None, InferHeaders(b"gzip", None, None), body, replies.append)
    await until(lambda: len(replies) == 3)
    assert [reply.status for reply in replies] == [503, 200, 200]
    assert (b"retry-after", b"1") in replies[0].headers.pairs
    loopback.receive_budget.bytes_max = 1
    small = gzip.compress(json_body())
    loopback.infer.submit("m", None, InferHeaders(b"gzip", None, None), small, replies.append)
    await until(lambda: len(replies) == 4)
    assert replies[3].status == 200, "a small one is always read"
    assert loopback.receive_budget.bytes == 0


async def test_a_fault_of_ours_is_a_500_that_is_in_the_log(
    servers: tuple[Served, Served],
    loopback: Loopback,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    route = loopback.lanes.routes["m", None]

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    assert isinstance(route.responder, RestResponder)
    encoder = route.responder._encoder
    parts = (
        (route.decoder, "decode"),
        (encoder, "encode"),
        (millstream.gateway.v2.service, "decompress"),
        (InferService, "submit"),
    )
    for part, name in parts:
        with monkeypatch.context() as patch:
            patch.setattr(part, name, broken)
            if name == "encode":
                patch.setattr(part, "encode_all", broken)
            for server in servers:
                caplog.clear()
                first, second = await exchange(server.port, CASES["gzip in"][1], CASES["unknown model"][1])
                assert first.status == 500
                error_id = orjson.loads(first.body)["error"].removeprefix("internal error ")
                assert len(error_id) == 12
                assert error_id in caplog.text
                assert "ZeroDivisionError" in caplog.text
                assert second.status == (500 if name == "submit" else 404)
        assert loopback.admission.requests == 0


async def test_a_body_that_cannot_be_unpacked_counts_for_its_version(loopback: Loopback) -> None:
    def counted() -> float:
        return sum(
            sum(values)
            for key, values in loopback.tally.totals().items()
            if key.name == "millstream_requests_total" and (*key.labels[:2], key.labels[-1]) == ("m", "1", "invalid")
        )

    before = counted()
    replies: list[HttpReply] = []
    loopback.infer.submit("m", None, InferHeaders(b"gzip", None, None), b"no gzip", replies.append)
    await until(lambda: bool(replies))
    assert (replies[0].status, counted() - before) == (400, 1)
