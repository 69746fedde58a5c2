"""The two ends of a reply socket: what was sent arrives whole, once and in order, whatever befalls either end."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import uvloop

from millstream.services.queue import reply_links, reply_listener
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.reply_links import TRY_AGAIN_S, ReplyLinks, Sent
from millstream.services.queue.reply_listener import ReplySocket, remove_dead_sockets
from millstream.services.queue.reply_protocol import MESSAGE_BYTES_MAX, SOCKET_TYPE, socket_address, socket_name

KEYS = InstallationKeys("test")
CPU = KEYS.pool("cpu")
REPLIES = CPU.replies("0-7-ab-1")  # the list of the first connection of gateway 0-7-ab
GATEWAY = "0-7-ab"
NAME = socket_name("test", GATEWAY)
TIMEOUT_S = 120


class Received(list[bytes]):
    """The messages that a listener got."""

    async def until(self, count: int) -> None:
        """Wait for a number of messages."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def listening(folder: Path, gateway: str = GATEWAY) -> AsyncIterator[tuple[ReplySocket, Received]]:
    received = Received()
    listener = ReplySocket(folder, KEYS, gateway, received.append)
    listener.start()
    try:
        yield listener, received
    finally:
        listener.stop()


@contextmanager
def connected(folder: Path) -> Iterator[socket.socket]:
    """A connection that sends what no worker sends."""
    with socket.socket(socket.AF_UNIX, SOCKET_TYPE) as link, socket_address(folder, NAME) as address:
        link.connect(address)
        yield link


def run(test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def send(links: ReplyLinks[int], message: bytes, replies: bytes = REPLIES) -> None:
    """Send a message as soon as the gateway has welcomed the connection."""
    await until(lambda: links.send(replies, message, 0) is Sent.DELIVERED)


@pytest.fixture
def links(tmp_path: Path) -> Iterator[ReplyLinks[int]]:
    links = ReplyLinks[int](tmp_path, CPU)
    yield links
    links.close()


def test_replies_of_several_workers_arrive_whole_and_in_order(tmp_path):
    async def test() -> None:
        async with listening(tmp_path) as (listener, received):
            workers = [ReplyLinks[int](tmp_path, CPU) for _ in range(3)]
            sent = [b"%d %d " % (k, n) + b"x" * (n * 1000) for n in range(60) for k in range(3)]
            for message in sent:
                while not workers[message[0] - ord("0")].send(REPLIES, message, 0):
                    await asyncio.sleep(0.001)  # full: the listener reads
            await received.until(len(sent))
            for k in range(3):
                mine = b"%d " % k
                assert [m for m in received if m.startswith(mine)] == [m for m in sent if m.startswith(mine)]
            assert len(received) == len(sent)
            assert len(listener.links) == 3
            for worker in workers:
                worker.close()
            await until(lambda: not listener.links)

    run(test)


def test_only_this_user_can_connect_and_the_file_goes_with_its_gateway(tmp_path, links):
    async def test() -> None:
        async with listening(tmp_path):
            status = (tmp_path / NAME).lstat()
            assert (stat.S_ISSOCK(status.st_mode), stat.S_IMODE(status.st_mode)) == (True, 0o600)
            assert [path.name for path in tmp_path.iterdir()] == [NAME]
        assert list(tmp_path.iterdir()) == []

    run(test)


def test_a_process_of_another_user_is_neither_heard_nor_written_to(tmp_path, links, monkeypatch):
    async def test() -> None:
        async with listening(tmp_path) as (listener, received):
            mine = os.geteuid()
            with monkeypatch.context() as patched:
                patched.setattr(os, "geteuid", lambda: mine + 1)
                assert not links.send(REPLIES, b"for the owner of the socket", 0)
                with connected(tmp_path) as link:
                    assert await asyncio.to_thread(link.recv, 1) == b"", "the listener closes the connection"
            assert (received, listener.links) == ([], set())

    run(test)


def test_a_gateway_that_does_not_read_blocks_no_worker_and_loses_nothing(tmp_path, links):
    async def test() -> None:
        async with listening(tmp_path) as (_, received):
            sent = [b"%d" % n for n in range(100_000)]
            await send(links, b"reached")
            await received.until(1)
            received.clear()
            taken = next(
                n for n, message in enumerate(sent) if not links.send(REPLIES, message, 0)
            )  # no turn of the loop
            assert 0 < taken < len(sent)
            await received.until(taken)
            assert links.send(REPLIES, b"again", 0)
            await received.until(taken + 1)
            assert received == [*sent[:taken], b"again"]

    run(test)


def test_a_message_that_was_sent_is_read_after_its_worker_is_gone(tmp_path, links):
    async def test() -> None:
        async with listening(tmp_path) as (listener, received):
            for n in range(10):
                await send(links, b"%d" % n)
            links.close()
            await received.until(10)
            await until(lambda: not listener.links)

    run(test)


def test_a_message_is_read_although_its_worker_has_not_read_its_own(tmp_path):
    async def test() -> None:
        async with listening(tmp_path) as (listener, received):
            with connected(tmp_path) as link:
                await until(lambda: bool(listener.links))
                link.send(b"1")
                link.send(b"2")
            await until(lambda: not listener.links)
            assert received == [b"1", b"2"]

    run(test)


def test_large_messages_are_left_to_redis(tmp_path, links):
    async def test() -> None:
        async with listening(tmp_path) as (_, received):
            largest = os.urandom(MESSAGE_BYTES_MAX)
            assert not links.send(REPLIES, largest + b"x", 0)
            await send(links, largest)
            await received.until(1)
            assert received == [largest]

    run(test)


def test_forged_messages_do_no_harm(tmp_path, links, caplog):
    def refuse(message: bytes) -> None:
        if message == b"garbage":
            raise ValueError("not a reply")
        received.append(message)

    received = Received()

    async def test() -> None:
        listener = ReplySocket(tmp_path, KEYS, GATEWAY, refuse)
        listener.start()
        try:
            with connected(tmp_path) as link:
                link.send(b"x" * (MESSAGE_BYTES_MAX + 1))
                link.send(b"garbage")
                link.send(b"good")
                await received.until(1)
            await send(links, b"also good")
            await received.until(2)
        finally:
            listener.stop()

    run(test)
    assert received == [b"good", b"also good"]
    assert f"a message of more than {MESSAGE_BYTES_MAX} bytes" in caplog.text
    assert "a message on the reply socket is no reply: not a reply" in caplog.text


def test_a_removed_socket_keeps_its_connections(tmp_path, links):
    async def test() -> None:
        async with listening(tmp_path) as (_, received):
            await send(links, b"1")
            (tmp_path / NAME).unlink()
            assert links.send(REPLIES, b"2", 0)
            late = ReplyLinks[int](tmp_path, CPU)
            assert not late.send(REPLIES, b"3", 0)
            await received.until(2)
            assert received == [b"1", b"2"]

    run(test)


def test_a_gateway_that_was_away_is_tried_again_later(tmp_path):
    now = 0.0
    links = ReplyLinks[int](tmp_path, CPU, lambda: now)

    async def test() -> None:
        nonlocal now
        assert not links.send(REPLIES, b"before it listens", 0)
        links.found(GATEWAY, None)
        async with listening(tmp_path) as (_, received):
            assert not links.send(REPLIES, b"too early", 0), "a gateway elsewhere is not looked for with each reply"
            now += TRY_AGAIN_S
            await send(links, b"1")
            await received.until(1)
        assert not links.send(REPLIES, b"it has left", 0)
        async with listening(tmp_path) as (_, received):
            now += TRY_AGAIN_S
            await send(links, b"2", CPU.replies("0-7-ab-2"))  # the list of a later connection, the same gateway
            await received.until(1)

    run(test)
    links.close()


@pytest.mark.parametrize(
    "replies", [CPU.replies("../0-7-ab-1"), CPU.replies("/etc-1"), b"", b"\xff", CPU.replies("\0-1")]
)
def test_a_list_that_names_no_gateway_is_left_to_redis(tmp_path, links, replies):
    async def test() -> None:
        async with listening(tmp_path) as (_, received):
            assert not links.send(replies, b"x", 0)
            assert received == []

    run(test)


def test_without_a_folder_all_replies_come_through_redis(tmp_path, caplog):
    async def test() -> None:
        async with listening(tmp_path / "missing"):
            assert not ReplyLinks[int](tmp_path / "missing", CPU).send(REPLIES, b"x", 0)

    run(test)
    assert "come through Redis: no socket in" in caplog.text


def test_a_long_path_is_no_obstacle(tmp_path):
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)

    async def test() -> None:
        async with listening(folder) as (_, received):
            links = ReplyLinks[int](folder, CPU)
            await send(links, b"x")
            await received.until(1)
            links.close()

    run(test)


def test_connections_are_bounded_at_both_ends(tmp_path, monkeypatch):
    async def test() -> None:
        monkeypatch.setattr(reply_listener, "LINKS_MAX", 1)
        monkeypatch.setattr(reply_links, "LINKS_MAX", 2)
        async with listening(tmp_path) as (listener, received):
            first, second = ReplyLinks[int](tmp_path, CPU), ReplyLinks[int](tmp_path, CPU)
            await send(first, b"1")
            await received.until(1)
            with connected(tmp_path) as link:
                assert await asyncio.to_thread(link.recv, 1) == b""
            for _ in range(100):  # refused, so nothing is lost in it
                assert not second.send(REPLIES, b"one too many", 0)
                await asyncio.sleep(0)
            for n in range(4):  # gateways elsewhere
                assert not first.send(CPU.replies(f"gone-{n}-1"), b"x", 0)
            await until(lambda: not listener.links)  # it was forgotten, too
            second.close()
            await send(second, b"2")
            await received.until(2)
            assert received == [b"1", b"2"]
            for links in (first, second):
                links.close()

    run(test)


def test_a_gateway_without_a_free_file_descriptor_accepts_later(tmp_path, links, monkeypatch, caplog):
    monkeypatch.setattr(reply_listener, "ACCEPT_AGAIN_S", 0.01)

    async def test() -> None:
        async with listening(tmp_path) as (_, received):
            assert not links.send(REPLIES, b"0", 0)  # it is in the queue of connections
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with socket.socket() as free:
                lowest = free.fileno()
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                await until(lambda: "cannot be accepted" in caplog.text)
                assert not links.send(REPLIES, b"0", 0)  # nothing is sent to a gateway that does not read yet
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await send(links, b"1")
            await received.until(1)

    run(test)


def test_sockets_of_ended_gateways_are_removed_and_no_others(tmp_path):
    dead = socket.socket(socket.AF_UNIX, SOCKET_TYPE)
    with socket_address(tmp_path, socket_name("test", "dead")) as address:
        dead.bind(address)
        dead.listen()
    dead.close()
    other = socket.socket(socket.AF_UNIX, SOCKET_TYPE)
    with socket_address(tmp_path, socket_name("another", "dead")) as address:
        other.bind(address)
    other.close()
    (tmp_path / socket_name("test", "a file")).touch()

    async def test() -> None:
        async with listening(tmp_path):
            assert remove_dead_sockets(tmp_path, "test") == 0
            kept = {socket_name("another", "dead"), socket_name("test", "a file"), NAME}
            assert {path.name for path in tmp_path.iterdir()} == kept

    run(test)
