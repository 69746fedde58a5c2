"""What the fast path refuses, and that the refusal reaches a client that is still sending.

The bounds of bytes and connections hold without the fast path, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import millstream.gateway.connection.bounded_protocol
from millstream.gateway.access.browser_guard import BrowserGuard
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import fast_path_protocol
from millstream.gateway.connection.request_head import HEAD_BYTES_MAX, HEADERS_MAX, PATHS_MAX, PathCache, read_head
from tests.kit.handlers import Held
from tests.kit.servers import Front, fronting
from tests.kit.tls_wire import transport_of
from tests.kit.wire import PATIENCE_S, Wire, chunked, post, request, serving, until

pytestmark = pytest.mark.anyio
PATH = "/v2/models/m/infer"
NOW = "/v2/models/now/infer"
BODY_BYTES_MAX = 100_000
TOO_LARGE = b'{"error":"the request body is larger than the limit of 100000 bytes"}'
NOT_HTTP = b'{"error":"Invalid HTTP request received."}'
BIG_HEAD = b'{"error":"the request\'s head is larger than 65536 bytes"}'
BIG_FRAMING = b'{"error":"the chunk lines and trailers of the request are larger than 65536 bytes"}'
MUCH = 32 << 20  # more than the sockets between two processes hold


@pytest.fixture(scope="module", autouse=True, params=["plain", "tls"])
def transport(request: pytest.FixtureRequest) -> Iterator[None]:
    with transport_of(request.param):
        yield


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def started(transport: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    async with fronting(tmp_path_factory.mktemp("home"), body_bytes_max=BODY_BYTES_MAX) as front:
        yield front


@pytest.fixture(scope="module")
async def started_plain(transport: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    home = tmp_path_factory.mktemp("home")
    async with fronting(home, fast=False, body_bytes_max=BODY_BYTES_MAX) as front:
        yield front


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a refused client has the time to send all it has."""
    monkeypatch.setattr(millstream.gateway.connection.bounded_protocol, "LINGER_S", PATIENCE_S)


@pytest.fixture
async def front(started: Front) -> AsyncIterator[Front]:
    yield started
    await started.served.settled(0)
    assert started.receive_budget.bytes == 0
    assert started.held.empty


@pytest.fixture(params=[True, False], ids=["fast path", "plain"])
async def either(request: pytest.FixtureRequest, started: Front, started_plain: Front) -> AsyncIterator[Front]:
    front = started if request.param else started_plain
    yield front
    await front.served.settled(0)
    assert front.receive_budget.bytes == 0
    assert front.held.empty


async def still_works(wire: Wire) -> None:
    await wire.send(post(NOW, b"works"))
    assert (await wire.reply()).body == b"works"


async def test_a_declared_length_over_the_limit_is_refused_before_the_body_comes(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(request("POST", PATH, f"Content-Length: {MUCH}"))
        reply = await wire.reply()
        assert (reply.status, reply.body) == (413, TOO_LARGE)
        async with wire.sending(bytes(MUCH)) as sent:
            await sent
        assert front.receive_budget.bytes == 0
        await still_works(wire)


async def test_chunks_over_the_limit_are_refused_while_they_come(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(chunked(PATH, [bytes(1000)] * 101, end=b""))
        reply = await wire.reply()
        assert (reply.status, reply.body) == (413, TOO_LARGE)
        assert front.receive_budget.bytes == 0
        await wire.send(b"%x\r\n" % MUCH, bytes(MUCH), b"\r\n0\r\n\r\n")
        await still_works(wire)


@pytest.mark.parametrize("declared_first", [True, False])
async def test_the_refusal_waits_for_its_turn(front: Front, declared_first: bool) -> None:
    declared, in_chunks = post(PATH, bytes(BODY_BYTES_MAX + 1)), chunked(PATH, [bytes(1000)] * 101)
    async with await Wire.connect(front.port) as wire:
        await wire.send(post(PATH) + (declared + in_chunks if declared_first else in_chunks + declared))
        held = await front.held.next()
        # Reading may pause in the chunks until their turn comes: what is behind them need not have been read.
        await until(lambda: len(front.protocol.pipeline) >= (2 if declared_first else 1))
        held.answer()
        assert [(await wire.reply()).status for _ in range(3)] == [200, 413, 413]
        assert front.receive_budget.bytes == 0
        await still_works(wire)


async def test_a_refused_client_is_not_told_to_continue(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(request("POST", PATH, f"Content-Length: {BODY_BYTES_MAX + 1}", "Expect: 100-continue"))
        assert (await wire.reply()).status == 413


@pytest.mark.parametrize(
    ("begin", "status", "error"),
    [
        (request("POST", PATH, f"Content-Length: {MUCH}", "Connection: close"), 413, TOO_LARGE),
        (request("POST", PATH, f"Content-Length: {MUCH}", version="1.0"), 413, TOO_LARGE),
        (chunked(PATH, [bytes(1000)] * 101, "Connection: close", end=b"%x\r\n" % MUCH), 413, TOO_LARGE),
        (b"garbage\r\n\r\n", 400, NOT_HTTP),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000, 400, BIG_HEAD),
    ],
    ids=["length", "length, 1.0", "chunks", "garbage", "head"],
)
async def test_who_goes_on_sending_gets_the_reply_of_a_connection_that_closes(
    front: Front, begin: bytes, status: int, error: bytes
) -> None:
    """A socket that is closed while bytes come is reset, and the reply in it is lost."""
    async with await Wire.connect(front.port) as wire:
        await wire.send(begin, bytes(MUCH))
        reply = await wire.reply()
        assert (reply.status, reply.body) == (status, error)
        assert reply.headers[b"connection"] == b"close"
        assert await wire.rest() == b""


GARBAGE = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "NULs": bytes(100),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no such version": b"GET / HTTP/9.9\r\n\r\n",
    "no such method": b"BREW / HTTP/1.1\r\n\r\n",
    "no URL": b"POST  HTTP/1.1\r\n\r\n",
    "two lengths": request("POST", PATH, "Content-Length: 1", "Content-Length: 2"),
    "length that is no number": request("POST", PATH, "Content-Length: x"),
    "length below 0": request("POST", PATH, "Content-Length: -1"),
    "length of many digits": request("POST", PATH, "Content-Length: " + "9" * 400),
    "length and chunks": request("POST", PATH, "Content-Length: 1", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "another transfer encoding": request("POST", PATH, "Transfer-Encoding: gzip") + b"0\r\n\r\n",
    "header without a colon": request("POST", PATH, "hello"),
    "NUL in a header": request("POST", PATH, "x: a\0b"),
    "space in a header's name": request("POST", PATH, "x y: z"),
    "chunk size that is no number": request("POST", PATH, "Transfer-Encoding: chunked") + b"x\r\nabc\r\n",
    "chunk size of many digits": request("POST", PATH, "Transfer-Encoding: chunked") + b"f" * 40 + b"\r\nabc\r\n",
    "chunk without an end": request("POST", PATH, "Transfer-Encoding: chunked") + b"3\r\nabcdef\r\n",
}

FOREIGN = {"TLS": b"the client began with TLS: call http://", "HTTP/2": b"gRPC has a port of its own"}


@pytest.mark.parametrize("pieces", [1, 0], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("case", GARBAGE)
async def test_what_is_not_http_is_refused_in_json(front: Front, case: str, pieces: int) -> None:
    data = GARBAGE[case]
    async with await Wire.connect(front.port) as wire:
        await wire.send(*([data] if pieces else [bytes([byte]) for byte in data]))
        reply = await wire.reply()
        foreign = FOREIGN.get(case, b"Invalid HTTP request received.")
        assert reply.status == 400
        assert foreign in reply.body or (pieces == 0 and reply.body == NOT_HTTP)  # the start may come in pieces
        assert reply.headers[b"content-type"] == b"application/json"
        assert reply.headers[b"connection"] == b"close"
        assert await wire.rest() == b""


@pytest.mark.parametrize("case", GARBAGE)
async def test_garbage_does_not_overtake_the_replies_before_it(front: Front, case: str) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(post(PATH, b"1") + request("GET", "/v2/health/live"), GARBAGE[case])
        held = await front.held.next()
        await until(lambda: len(front.protocol.pipeline) == 2)
        held.answer(b"1")
        replies = [await wire.reply() for _ in range(3)]
        assert [reply.body for reply in replies] == [b"1", b'{"live":true}', NOT_HTTP]
        assert await wire.rest() == b""


async def test_garbage_behind_a_request_does_not_hide_that_its_client_left(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(post(PATH) + b"garbage\r\n\r\n" + bytes(1 << 20))
        held = await front.held.next()
    await asyncio.wait_for(held.cancelled.wait(), 120)
    assert held.cancels == 1


async def test_garbage_in_a_body_ends_the_application_that_reads_it() -> None:
    ended = asyncio.Event()

    async def app(_: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"never seen"})
        ended.set()

    async with serving(
        app, fast_path_protocol(Held(), 1 << 20, 100, ReceiveBudget(1 << 26), ReplyBudget(1 << 30))
    ) as served:
        async with await Wire.connect(served.port) as wire:
            await wire.send(chunked("/upload", [b"abc"], end=b"garbage"))
            assert (await wire.reply()).body == NOT_HTTP
            assert await wire.rest() == b""
        await asyncio.wait_for(ended.wait(), 120)
        await served.settled(0)


@pytest.mark.parametrize(
    "bomb",
    [
        [b"GET / HTTP/1.1\r\n", *[b"x: y\r\n" * 1000] * 60],
        [b"GET / HTTP/1.1\r\nx: ", *[b"y" * 1000] * 400],
        [b"GET /", *[b"y" * 1000] * 400],
        [post(NOW), b"POST " + PATH.encode(), *[b"y" * 1000] * 400],
    ],
    ids=["headers", "one header", "URL", "second request"],
)
async def test_a_head_without_end_is_refused(either: Front, bomb: list[bytes]) -> None:
    async with await Wire.connect(either.port) as wire:
        await wire.send(*bomb)
        said = await wire.rest()
        assert said.endswith(BIG_HEAD)
        assert b"connection: close" in said


@pytest.mark.parametrize("path", [NOW, "/v2/repository/models/m/load"])
@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\n", b"x: y\r\n" * 200),
        (b"0\r\nx: ", b"y" * 1000),
        (b"1;", b"y" * 1000),
        (b"", b"1;" + b"y" * 1000 + b"\r\nx\r\n"),
        (b"1", b";y" * 500),
    ],
    ids=["trailers", "one trailer", "one extension", "extension of each chunk", "many extensions"],
)
async def test_chunk_lines_and_trailers_without_end_are_refused(
    either: Front, path: str, begin: bytes, more: bytes
) -> None:
    """They are no part of the body, whose bytes have a limit of their own."""
    async with await Wire.connect(either.port) as wire:
        await wire.send(chunked(path, [b"x"], end=begin), *[more] * 400)
        said = await wire.rest()
        assert said.startswith(b"HTTP/1.1 400 ")
        assert said.endswith(BIG_FRAMING)


async def test_chunks_of_one_byte_are_a_body(either: Front) -> None:
    body = bytes(range(256)) * 100
    async with await Wire.connect(either.port) as wire:
        await wire.send(chunked(NOW, [body[at : at + 1] for at in range(len(body))]))
        assert (await wire.reply()).body == body
        await still_works(wire)


async def test_a_large_head_is_accepted(either: Front) -> None:
    filler = f"X-Filler: {'x' * (HEAD_BYTES_MAX // 2)}"
    data = post(NOW, b"works", filler)
    async with await Wire.connect(either.port) as wire:
        for _ in range(3):
            await wire.send(*[data[at : at + 1000] for at in range(0, len(data), 1000)])
            assert (await wire.reply()).body == b"works"


@pytest.mark.parametrize("path", [NOW, "/v2/health/live"])
async def test_a_head_of_many_headers_is_refused_also_in_one_segment(front: Front, path: str) -> None:
    method = "POST" if path == NOW else "GET"
    lines = ["Content-Length: 0", *(f"x-{number}:" for number in range(HEADERS_MAX - 2))]  # and Host
    async with await Wire.connect(front.port) as wire:
        await wire.send(request(method, path, *lines))
        assert (await wire.reply()).status == 200
        await wire.send(request(method, path, *lines, "one: more"))
        said = await wire.rest()
        assert said.startswith(b"HTTP/1.1 400 ")
        assert said.endswith(b'{"error":"the request has more than 1000 headers"}')


async def test_a_body_behind_half_a_head_is_no_head(either: Front) -> None:
    body = b"x" * (BODY_BYTES_MAX - 1)
    for data in (post(NOW, body), chunked(NOW, [body])):
        for cut in (1, data.index(b"xx")):
            async with await Wire.connect(either.port) as wire:
                await wire.send(data[:cut])
                await until(lambda: len(either.served.connections) == 1 and either.protocol._receiving)
                await wire.send(data[cut:])
                assert (await wire.reply()).body == body
            await either.served.settled(0)


def test_urls_are_remembered_within_bounds() -> None:
    paths = PathCache()
    for i in range(PATHS_MAX + 10):
        assert paths[b"/v2/models/m%d/infer" % i] == (f"m{i}", None)
        assert len(paths) <= PATHS_MAX
    assert paths[PATH.encode() + b"?" + b"x" * 10_000] == ("m", None)
    assert max(map(len, paths)) < 100


def test_a_path_that_a_route_answers_is_no_infer_post() -> None:
    paths = PathCache(routed=[PATH])
    for url in (PATH, PATH + "?a=1", PATH.replace("infer", "%69nfer")):
        sent = f"POST {url} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n".encode()
        assert paths[url.encode()] is None
        assert read_head(sent, paths, BODY_BYTES_MAX, BrowserGuard()) is None
    assert paths[b"/v2/models/other/infer"] == ("other", None)


async def test_bytes_that_are_received_at_once_are_bounded(tmp_path: Path) -> None:
    async with fronting(tmp_path, inbound_bytes_max=100_000) as front, await Wire.connect(front.port) as third:
        first, second = await Wire.connect(front.port), await Wire.connect(front.port)
        await first.send(post(PATH, bytes(60_000))[:-1])
        await until(lambda: front.receive_budget.bytes == 59_999)
        await second.send(chunked(PATH, [bytes(39_000)], end=b""))
        await until(lambda: front.receive_budget.bytes == 98_999)
        await third.send(post(NOW, bytes(2000)))
        reply = await third.reply()
        assert (reply.status, reply.headers[b"retry-after"]) == (503, b"1")
        assert reply.body == b'{"error":"100000 bytes are being received; try again later"}'
        assert front.receive_budget.bytes == 98_999
        second.close()
        await until(lambda: front.receive_budget.bytes == 59_999)
        await still_works(third)
        await first.send(b"x")
        (await front.held.next()).answer()
        assert (await first.reply()).status == 200
        assert front.receive_budget.bytes == 0
        first.close()


@pytest.mark.parametrize("fast", [True, False])
async def test_connections_are_bounded(tmp_path: Path, fast: bool) -> None:
    async with fronting(tmp_path, fast=fast, connections_max=3) as front:
        taken = [await Wire.connect(front.port) for _ in range(3)]
        await front.served.settled(3)
        async with await Wire.connect(front.port) as refused:
            await refused.send(post(PATH, bytes(MUCH)))
            reply = await refused.reply()
            assert (reply.status, reply.headers[b"retry-after"]) == (503, b"1")
            assert reply.headers[b"connection"] == b"close"
            assert reply.body == b'{"error":"too many connections are open; try again later"}'
            assert await refused.rest() == b""
        await front.served.settled(3)
        for wire in taken:
            await still_works(wire)
        taken.pop().close()
        await front.served.settled(2)
        taken.append(await Wire.connect(front.port))
        await still_works(taken[-1])
        lingering = [await Wire.connect(front.port) for _ in range(3)]
        await front.served.settled(6)
        async with await Wire.connect(front.port) as dropped:
            assert await dropped.rest() == b""
        for wire in (*taken, *lingering):
            wire.close()
