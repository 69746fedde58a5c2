"""How connections end: clients that leave, idle ones, stuck ones, and the server's graceful shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import millstream.gateway.connection.bounded_protocol
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import fast_path_protocol
from tests.kit.handlers import Held
from tests.kit.servers import Front, fronting
from tests.kit.tls_wire import transport_of
from tests.kit.wire import Wire, chunked, post, request, serving, until

pytestmark = pytest.mark.anyio
PATH = "/v2/models/m/infer"
NOW = "/v2/models/now/infer"
LIVE = request("GET", "/v2/health/live")
SOON_S = 0.05


@pytest.fixture(scope="module", autouse=True, params=["plain", "tls"])
def transport(request: pytest.FixtureRequest) -> Iterator[None]:
    with transport_of(request.param):
        yield


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=["fast path", "plain"])
async def either(
    request: pytest.FixtureRequest, transport: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Front]:
    """What both guarantee: the fast path, and uvicorn with the bounds of the fast path."""
    async with fronting(tmp_path_factory.mktemp("home"), fast=request.param == "fast path") as front:
        yield front


@pytest.fixture(scope="module")
async def front(transport: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    async with fronting(tmp_path_factory.mktemp("home")) as front:
        yield front


@asynccontextmanager
async def hurried(front: Front) -> AsyncIterator[Wire]:
    """A connection that is soon given up, from the first byte it sends; not before it sends, on however slow a
    machine.
    """
    await front.served.settled(0)
    async with await Wire.connect(front.port) as wire:
        await front.served.settled(1)
        front.protocol.timeout_keep_alive = SOON_S
        yield wire
    await front.served.settled(0)


async def test_a_connection_is_used_again(either: Front) -> None:
    async with await Wire.connect(either.port) as wire:
        for _ in range(20):
            await wire.send(post(PATH))
            (await either.held.next()).answer()
            assert (await wire.reply()).status == 200
            await wire.send(LIVE)
            assert (await wire.reply()).status == 200
        assert len(either.served.connections) == 1


@pytest.mark.parametrize("leave", ["close", "half_close"])
async def test_a_client_that_leaves_cancels_its_request_once(either: Front, leave: str) -> None:
    async with await Wire.connect(either.port) as wire:
        await wire.send(post(PATH, b"abc"))
        held = await either.held.next()
        getattr(wire, leave)()
        await asyncio.wait_for(held.cancelled.wait(), 120)
        await either.served.settled(0)
        held.answer()  # as a handler may that did not hear of it in time
        assert held.cancels == 1


async def test_a_client_that_leaves_half_way_through_a_body_asked_nothing(either: Front) -> None:
    for part in (post(PATH, b"x" * 100_000)[:50_000], request("POST", PATH, "Transfer-Encoding: chunked") + b"5\r\nab"):
        async with await Wire.connect(either.port) as wire:
            await wire.send(part)
            await either.served.settled(1)
        await either.served.settled(0)
        assert either.held.empty
        assert either.receive_budget.bytes == 0


async def test_a_client_that_leaves_cancels_once_whatever_waits_behind(front: Front) -> None:
    behind = post(PATH, b"x" * 1000), LIVE, request("POST", PATH, "Content-Length: 9") + b"xx"
    async with await Wire.connect(front.port) as wire:
        await wire.send(post(PATH) + b"".join(behind))
        held = await front.held.next()
        await until(lambda: len(front.protocol.pipeline) == 3)
        assert front.receive_budget.bytes == 1002
        wire.close()
        await asyncio.wait_for(held.cancelled.wait(), 120)
    await front.served.settled(0)
    assert held.cancels == 1
    assert front.receive_budget.bytes == 0


async def test_a_client_that_leaves_after_its_reply_cancels_nothing(front: Front) -> None:
    async with await Wire.connect(front.port) as wire:
        await wire.send(post(PATH))
        held = await front.held.next()
        held.answer()
        assert (await wire.reply()).status == 200
    await front.served.settled(0)
    async with await Wire.connect(front.port, receive_bytes=65536) as wire:
        await wire.send(post(PATH))
        unread = await front.held.next()
        unread.answer(b"x" * (8 << 20))
        assert front.protocol.flow.write_paused
    await front.served.settled(0)
    assert (held.cancels, unread.cancels) == (0, 0)


async def test_an_application_hears_that_its_client_left_whatever_waits_behind() -> None:
    """uvicorn tells the last request that it read, which need not be the one that runs."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def app(_: Any, receive: Any, __: Any) -> None:
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    lane = fast_path_protocol(Held(), 1 << 20, 100, ReceiveBudget(1 << 26), ReplyBudget(1 << 30))
    async with serving(app, lane) as served:
        async with await Wire.connect(served.port) as wire:
            await wire.send(LIVE + post(PATH) + LIVE)
            await asyncio.wait_for(asked.wait(), 120)
            (protocol,) = served.connections
            await until(lambda: len(protocol.pipeline) == 2)
        await asyncio.wait_for(left.wait(), 120)
        await until(lambda: not served.server.server_state.tasks)


async def test_an_idle_connection_is_closed(either: Front) -> None:
    for first in (post(NOW), LIVE):
        async with hurried(either) as wire:
            await wire.send(first)
            assert (await wire.reply()).status == 200
            assert await wire.rest() == b""


@pytest.mark.parametrize("first", [b"", post(NOW), LIVE], ids=["nothing", "post", "get"])
async def test_empty_lines_do_not_keep_a_connection(
    either: Front, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    """A client may send some before a request (RFC 9112 2.2), and then sends none."""
    monkeypatch.setattr(either.served.server.config, "timeout_keep_alive", SOON_S)
    async with await Wire.connect(either.port) as wire:
        with pytest.raises(OSError):
            await wire.send(first)
            for _ in range(10_000):
                await wire.send(b"\r\n")
                await asyncio.sleep(SOON_S / 5)
    await either.served.settled(0)


async def test_empty_lines_before_a_request(either: Front) -> None:
    async with await Wire.connect(either.port) as wire:
        for lines in (b"\r\n", b"\r\n\r\n\r\n"):
            await wire.send(lines)
            await wire.send(post(NOW))
            assert (await wire.reply()).status == 200


async def trickle(wire: Wire) -> None:
    """A byte now and then, before the connection could be taken for an idle one."""
    for _ in range(10_000):
        await wire.send(b"x")
        await asyncio.sleep(SOON_S / 5)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "part",
    [
        b"P",
        post(PATH, b"x" * 1000)[:-900],
        request("POST", PATH, "Transfer-Encoding: chunked") + b"1;",
        request("POST", "/v2/repository/models/m/load", "Content-Length: 1000"),
    ],
    ids=["head", "body", "chunk line", "body of a route"],
)
async def test_a_client_that_trickles_is_let_go_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: bytes, fast: bool
) -> None:
    """Each byte would begin the time of an idle connection anew."""
    monkeypatch.setattr(millstream.gateway.connection.bounded_protocol, "LINGER_S", SOON_S)
    async with fronting(tmp_path, fast=fast, client_stall_s_max=SOON_S * 4) as front:
        async with await Wire.connect(front.port) as wire:
            await wire.send(part)
            with pytest.raises(OSError):
                await trickle(wire)
        await front.served.settled(0)
        assert front.receive_budget.bytes == 0
        assert front.held.empty


@pytest.mark.parametrize("fast", [True, False])
async def test_a_client_that_never_reads_its_reply_is_let_go(tmp_path: Path, fast: bool) -> None:
    async with (
        fronting(tmp_path, fast=fast, client_stall_s_max=SOON_S) as front,
        await Wire.connect(front.port, receive_bytes=65536) as wire,
    ):
        await wire.send(post(PATH))
        (await front.held.next()).answer(b"x" * (8 << 20))
        await front.served.settled(0)


async def test_a_client_that_reads_slowly_gets_all_of_its_reply(tmp_path: Path) -> None:
    async with (
        fronting(tmp_path, client_stall_s_max=60) as front,
        await Wire.connect(front.port, receive_bytes=65536) as wire,
    ):
        for _ in range(2):
            await wire.send(post(PATH))
            (await front.held.next()).answer(b"x" * (8 << 20))
            await asyncio.sleep(SOON_S)
            assert len((await wire.reply()).body) == 8 << 20
        assert not front.protocol._write_stall.active


async def test_a_client_that_says_nothing_is_let_go(either: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(either.served.server.config, "timeout_keep_alive", SOON_S)
    async with await Wire.connect(either.port) as wire:
        assert await wire.rest() == b""


@pytest.mark.parametrize(
    "part",
    [
        b"P",
        post(PATH, b"abc")[:-1],
        request("POST", PATH, "Transfer-Encoding: chunked"),
        post(NOW) + LIVE + b"GET ",
        post(NOW) + post(PATH, b"abc")[:-1],
        LIVE + post(PATH, b"abc")[:-1],
    ],
    ids=["letter", "body", "chunks", "third request", "body behind a post", "body behind a get"],
)
async def test_a_stuck_client_is_let_go(either: Front, monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    """Else a few of them would hold all connections, or all bytes that may be received at once."""
    monkeypatch.setattr(millstream.gateway.connection.bounded_protocol, "LINGER_S", SOON_S)
    async with hurried(either) as wire:
        await wire.send(part)
        said = await wire.rest()
        assert said.count(b"200 OK") == part.count(b" HTTP/1.1") - (PATH.encode() in part)
        assert said.count(b"HTTP/1.1") == said.count(b"200 OK") + 1
        assert said.rpartition(b"HTTP/1.1")[2].startswith(b" 408 ")
        await either.served.settled(0)
        assert either.receive_budget.bytes == 0
        assert either.held.empty


NO_ROUTE = "/no/such/path"
CHUNKED = "Transfer-Encoding: chunked"
#: what follows the first reply, and ends its connection
STOPS = {"a byte": b"x", "no chunk": b"no size\r\n", "endless chunk line": b"1;" + b"x" * 100_000}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(
    ("part", "status"),
    [
        (request("POST", PATH, "Content-Length: 99999999"), 413),
        (chunked(PATH, [bytes(1 << 20)] * 17, end=b""), 413),
        (request("POST", NO_ROUTE, "Content-Length: 1000000"), 404),
        (request("POST", NO_ROUTE, CHUNKED), 404),
    ],
    ids=["length", "chunks", "length of a route", "chunks of a route"],
)
async def test_a_request_that_was_answered_early_gets_no_second_reply(
    either: Front, part: bytes, status: int, stop: str
) -> None:
    """A client, or a proxy that shares the connection, would take it for the reply to its next request."""
    async with await Wire.connect(either.port) as wire:
        async with wire.sending(part) as sent:
            assert (await wire.reply()).status == status
            await sent
        await either.served.settled(1)
        either.protocol.timeout_keep_alive = SOON_S
        await wire.send(STOPS[stop])
        assert await wire.rest() == b""
    await either.served.settled(0)
    assert either.receive_budget.bytes == 0


async def test_what_follows_a_request_that_was_answered_early_gets_its_own_reply(either: Front) -> None:
    begin = request("POST", NO_ROUTE, "Content-Length: 3")
    for behind in (b"garbage\r\n\r\n", request("POST", PATH, "Content-Length: x")):
        async with await Wire.connect(either.port) as wire:
            await wire.send(begin)
            assert (await wire.reply()).status == 404
            await wire.send(b"abc" + LIVE)
            assert (await wire.reply()).status == 200
            await wire.send(begin)
            assert (await wire.reply()).status == 404
            await wire.send(b"abc" + behind)
            assert (await wire.reply()).status == 400
            assert await wire.rest() == b""


@pytest.mark.parametrize("behind", [b"", b"POST ", post(PATH, b"abc")[:-1]], ids=["nothing", "word", "half a post"])
@pytest.mark.parametrize("before", [b"", post(NOW), LIVE], ids=["nothing", "post", "get"])
async def test_a_client_that_waits_for_its_reply_is_not_idle(
    either: Front, monkeypatch: pytest.MonkeyPatch, before: bytes, behind: bytes
) -> None:
    async with hurried(either) as wire:
        await wire.send(before + post(PATH) + behind)
        held = await either.held.next()
        monkeypatch.setattr(either.served.server.config, "timeout_keep_alive", SOON_S)
        for _ in range(3):  # each as long as an idle connection lives
            async with await Wire.connect(either.port) as idle:
                assert await idle.rest() == b""
        held.answer()
        if before:
            assert (await wire.reply()).status == 200
        assert (await wire.reply()).body == b"{}"
        assert (await wire.rest()).startswith(b"HTTP/1.1 408 ") == bool(behind)
        assert held.cancels == 0


@pytest.mark.parametrize("fast", [True, False])
async def test_shutdown_answers_what_is_in_flight_and_closes_what_is_idle(tmp_path: Path, fast: bool) -> None:
    async with fronting(tmp_path, fast=fast) as front:
        idle, fresh, busy = [await Wire.connect(front.port) for _ in range(3)]
        await idle.send(LIVE)
        await idle.reply()
        await busy.send(post(PATH))
        held = await front.held.next()
        await front.served.settled(3)
        front.served.server.should_exit = True
        assert await idle.rest() == await fresh.rest() == b""
        with pytest.raises(OSError):
            await Wire.connect(front.port)
        assert not front.served.running.done()
        held.answer(b"1")
        reply = await busy.reply()
        assert (reply.status, reply.body, reply.headers[b"connection"]) == (200, b"1", b"close")
        assert await busy.rest() == b""
        await asyncio.wait_for(front.served.running, 120)
        for wire in (idle, fresh, busy):
            wire.close()


async def test_shutdown_answers_what_was_pipelined(tmp_path: Path) -> None:
    async with (
        fronting(tmp_path) as front,
        await Wire.connect(front.port) as wire,
        await Wire.connect(front.port) as idle,
    ):
        await wire.send(post(PATH, b"1") + LIVE + post(PATH, b"2"))
        first = await front.held.next()
        await front.served.settled(2)
        front.served.server.should_exit = True
        assert await idle.rest() == b""
        first.answer(b"1")
        (await front.held.next()).answer(b"2")
        replies = [await wire.reply() for _ in range(3)]
        assert [reply.body for reply in replies] == [b"1", b'{"live":true}', b"2"]
        assert [b"connection" in reply.headers for reply in replies] == [False, False, True]
        assert await wire.rest() == b""


async def test_a_refused_client_that_does_not_leave_is_let_go(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millstream.gateway.connection.bounded_protocol, "LINGER_S", 0.01)
    async with await Wire.connect(front.port) as wire:
        await wire.send(b"garbage\r\n\r\n")
        assert (await wire.reply()).status == 400
        assert await wire.rest() == b""
        await front.served.settled(0)


async def test_nothing_behind_a_close_is_done(front: Front) -> None:
    for close in (post(NOW, b"1", "Connection: close"), post(NOW, b"1", version="1.0")):
        taken = front.held.taken
        async with await Wire.connect(front.port) as wire:
            await wire.send(close + post(PATH, b"2") + LIVE)
            said = await wire.rest()
            assert said.count(b"HTTP/1.1") == 1
            assert said.endswith(b"connection: close\r\n\r\n1")
            assert front.held.taken == taken + 1
