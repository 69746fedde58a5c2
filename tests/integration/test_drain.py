"""How a gateway's server leaves: what it accepts, says, answers and closes, and in which order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import millstream.gateway.connection.bounded_protocol
import millstream.gateway.connection.server
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.server import Server
from tests.kit.handlers import HeldRequest
from tests.kit.servers import Front, fronting
from tests.kit.wire import Wire, WireReply, post, request, until

pytestmark = pytest.mark.anyio
PATH = "/v2/models/m/infer"
LIVE = request("GET", "/v2/health/live")
SOON_S, LONG_S = 0.05, 600.0


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(params=[True, False], ids=["fast path", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Leaver:
    """A gateway whose requests are answered by the test; those in `waiting` are refused when it gives up."""

    def __init__(self) -> None:
        self.drain = Drain()
        self.is_ready = False
        self.waiting: list[HeldRequest] = []

    def ready(self) -> bool:
        return self.is_ready

    async def settle(self) -> None:
        return

    def abandon(self) -> None:
        while self.waiting:
            self.waiting.pop().answer(b"given up")


@asynccontextmanager
async def leaving(
    tmp_path: Path, *, fast: bool = True, shared: bool = True, drain_s: float = LONG_S, ready_fd: int | None = None
) -> AsyncIterator[tuple[Front, Leaver]]:
    leaver = Leaver()
    server_of = partial(Server, gateway=leaver, drain_s=drain_s, shared_port=shared, ready_fd=ready_fd)
    async with fronting(tmp_path, fast=fast, drain=leaver.drain, server_of=server_of) as front:
        yield front, leaver


async def told_to_stop(front: Front, leaver: Leaver) -> None:
    front.served.server.should_exit = True
    await until(lambda: leaver.drain.draining)


def closes(reply: WireReply) -> bool:
    return reply.headers.get(b"connection") == b"close"


async def test_whoever_asks_meanwhile_is_answered_and_told_to_go(
    tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(millstream.gateway.connection.server, "NOTICE_S_MAX", LONG_S)  # it ends when all have gone
    monkeypatch.setattr(millstream.gateway.connection.bounded_protocol, "LINGER_S", SOON_S)  # clients close at the end
    async with leaving(tmp_path, fast=fast) as (front, leaver):
        idle, halfway, busy, fresh = [await Wire.connect(front.port) for _ in range(4)]
        await idle.send(LIVE)
        assert not closes(await idle.reply())
        half = post(PATH, b"half")
        await halfway.send(half[:20])
        await busy.send(post(PATH, b"busy"))
        held = await front.held.next()
        await front.served.settled(4)
        await told_to_stop(front, leaver)
        with pytest.raises(OSError):
            await Wire.connect(front.port)
        await idle.send(LIVE)
        await halfway.send(half[20:])
        (await front.held.next()).answer(b"half")
        await fresh.send(post(PATH, b"fresh"))
        (await front.held.next()).answer(b"fresh")
        replies = [await wire.reply() for wire in (idle, halfway, fresh)]
        assert [reply.body for reply in replies] == [b'{"live":true}', b"half", b"fresh"]
        assert all(closes(reply) for reply in replies)
        assert not front.served.running.done()
        held.answer(b"busy")
        last = await busy.reply()
        assert last.body == b"busy"
        # uvicorn decides before it runs an application, and a connection that was not told is closed when it is idle
        assert closes(last) == fast
        busy.close()
        assert [await wire.rest() for wire in (idle, halfway, fresh)] == [b"", b"", b""]
        await asyncio.wait_for(front.served.running, 120)
        for wire in (idle, halfway, fresh):
            wire.close()


async def test_a_client_that_pipelines_is_told_by_the_last_answer(tmp_path: Path) -> None:
    async with leaving(tmp_path) as (front, leaver), await Wire.connect(front.port) as wire:
        await wire.send(post(PATH, b"1"))
        first = await front.held.next()
        await told_to_stop(front, leaver)
        await wire.send(post(PATH, b"2"), LIVE, post(PATH, b"3"))
        await until(lambda: len(front.protocol.pipeline) == 3)
        first.answer(b"1")
        for body in (b"2", b"3"):
            (await front.held.next()).answer(body)
        replies = [await wire.reply() for _ in range(4)]
        assert [reply.body for reply in replies] == [b"1", b"2", b'{"live":true}', b"3"]
        assert [closes(reply) for reply in replies] == [False, False, False, True]
        assert await wire.rest() == b""


@pytest.mark.parametrize("fits", [True, False], ids=["in the kernel", "blocked"])
@pytest.mark.parametrize(
    ("fast", "path"),
    [(True, PATH), (True, f"{PATH}?route=asgi"), (False, PATH)],
    ids=["fast path", "route beside the fast path", "plain"],
)
async def test_a_request_that_crosses_the_last_reply_does_not_cut_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool, path: str, fits: bool
) -> None:
    """A socket that is closed for reading would answer it with a reset."""
    body = bytes(300_000)
    monkeypatch.setattr(millstream.gateway.connection.server, "NOTICE_S_MAX", LONG_S)  # it ends when all have gone
    async with (
        leaving(tmp_path, fast=fast) as (front, leaver),
        await Wire.connect(front.port, receive_bytes=8192) as wire,
    ):
        await front.served.settled(1)
        await told_to_stop(front, leaver)
        await wire.send(post(path, b"1"))
        held = await front.held.next()
        own = front.protocol.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20 if fits else 8192)
        held.answer(body)
        for _ in range(100):  # turns of the event loop, in which a connection that is not kept is closed
            await asyncio.sleep(0)
        assert front.protocol.flow.write_paused != fits
        front.protocol.shutdown()  # as the server does when the notice is over
        await wire.send(post(PATH, b"2"))
        reply = await wire.reply()
        assert closes(reply)
        assert reply.body == body
        assert await wire.rest() == b""


async def test_idle_connections_close_when_the_notice_is_over_and_half_requests_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(millstream.gateway.connection.server, "NOTICE_S_MAX", 0.05)
    monkeypatch.setattr(millstream.gateway.connection.bounded_protocol, "LINGER_S", SOON_S)
    async with leaving(tmp_path) as (front, leaver):
        idle, halfway = [await Wire.connect(front.port) for _ in range(2)]
        half = post(PATH, b"half")
        await halfway.send(half[:20])
        await front.served.settled(2)
        await told_to_stop(front, leaver)
        assert await idle.rest() == b""
        assert not front.served.running.done()
        await halfway.send(half[20:])
        (await front.held.next()).answer(b"half")
        assert closes(await halfway.reply())
        await asyncio.wait_for(front.served.running, 120)
        for wire in (idle, halfway):
            wire.close()


async def test_with_a_port_of_its_own_it_goes_on_accepting_until_everybody_can_have_seen_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = False
    monkeypatch.setattr(millstream.gateway.connection.server, "NOTICE_S_MAX", LONG_S)  # it ends when everybody has
    monkeypatch.setattr(millstream.gateway.connection.server, "_never", lambda: seen)
    async with leaving(tmp_path, shared=False) as (front, leaver):
        await told_to_stop(front, leaver)
        async with await Wire.connect(front.port) as wire:
            await wire.send(LIVE)
            assert closes(await wire.reply())
        assert not front.served.running.done()
        seen = True
        await asyncio.wait_for(front.served.running, 120)
        with pytest.raises(OSError):
            await Wire.connect(front.port)


async def test_after_sigterm_to_the_only_process_of_a_port_it_accepts_until_the_delay_is_over(tmp_path: Path) -> None:
    async with leaving(tmp_path, shared=False) as (front, leaver):
        server = front.served.server
        assert isinstance(server, Server)
        server.delay_s = 3.0
        server.handle_exit(signal.SIGTERM, None)
        await until(lambda: leaver.drain.draining)
        async with await Wire.connect(front.port) as wire:
            await wire.send(LIVE)
            assert closes(await wire.reply())
        await asyncio.wait_for(front.served.running, 120)
        with pytest.raises(OSError):
            await Wire.connect(front.port)


async def test_what_is_not_answered_in_time_is_given_up_and_it_ends(tmp_path: Path) -> None:
    async with leaving(tmp_path, drain_s=0.4) as (front, leaver), await Wire.connect(front.port) as wire:
        await wire.send(post(PATH, b"late"))
        leaver.waiting.append(await front.held.next())
        await told_to_stop(front, leaver)
        reply = await wire.reply()
        assert (reply.body, closes(reply)) == (b"given up", True)
        assert await wire.rest() == b""
        await asyncio.wait_for(front.served.running, 120)


async def test_a_client_that_reads_nothing_keeps_nobody_from_leaving(tmp_path: Path) -> None:
    async with (
        leaving(tmp_path, drain_s=0.4) as (front, _),
        await Wire.connect(front.port, receive_bytes=65536) as wire,
    ):
        await wire.send(post(PATH))
        (await front.held.next()).answer(b"x" * (8 << 20))
        assert front.protocol.flow.write_paused
        front.served.server.should_exit = True
        await asyncio.wait_for(front.served.running, 120)
        assert not front.served.connections


async def test_it_says_when_it_is_ready_for_the_first_time(tmp_path: Path) -> None:
    hears, says = os.pipe()
    try:
        async with leaving(tmp_path, ready_fd=says) as (_, leaver):
            os.set_blocking(hears, False)
            for _ in range(5):
                await asyncio.sleep(0)
                with pytest.raises(BlockingIOError):
                    os.read(hears, 10)
            leaver.is_ready = True
            os.set_blocking(hears, True)
            assert await asyncio.to_thread(os.read, hears, 10) == b"ready\n"
            assert await asyncio.to_thread(os.read, hears, 10) == b""  # and closes it
    finally:
        os.close(hears)
