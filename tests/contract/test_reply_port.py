"""The two ends of a reply connection between hosts: each reply is delivered, or its sender is told to send it again."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.services.queue import reply_links, reply_port
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.reply_links import RECEIPT_S_MAX, TRY_AGAIN_S, ReplyLinks, Sent
from millstream.services.queue.reply_port import WARN_AGAIN_S, ReplyPort
from millstream.services.queue.reply_protocol import (
    FRAME_HEAD,
    HELLO,
    MESSAGE_BYTES_MAX,
    NONCE_BYTES,
    PROOF_BYTES,
    RECEIPT,
    UNCONFIRMED_BYTES_MAX,
    ReplyAddress,
    encode_login,
)
from tests.kit.ports import free_port
from tests.kit.wire import until

HOST = "127.0.0.1"
GATEWAY = "0-7-ab"
TIMEOUT_S = 120


class Received(list[tuple[str, bytes]]):
    """The pools and replies that a listener got."""

    @property
    def replies(self) -> list[bytes]:
        return [reply for _, reply in self]


@asynccontextmanager
async def listening(
    on_reply: Callable[[str, bytes], None] | None = None, port: int = 0
) -> AsyncIterator[tuple[ReplyPort, Received]]:
    received = Received()
    listener = ReplyPort(port, on_reply or (lambda pool, reply: received.append((pool, reply))))
    assert listener.listen(HOST)
    try:
        yield listener, received
    finally:
        listener.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())  # type: ignore[arg-type]


OPENED: list[ReplyLinks[int]] = []
NO_SOCKETS = Path("/nonexistent")  # the gateways are on other hosts


@pytest.fixture(autouse=True)
def close_links() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "reply login":
            thread.join(TIMEOUT_S)
    while OPENED:
        OPENED.pop().close()


def new_links(pool: str = "cpu", clock: Callable[[], float] = time.monotonic) -> ReplyLinks[int]:
    links = ReplyLinks[int](NO_SOCKETS, InstallationKeys("test").pool(pool), clock)
    OPENED.append(links)
    return links


def replies_of(links: ReplyLinks[int], gateway: str = GATEWAY) -> bytes:
    """Return the name of a gateway's reply list."""
    return links._keys.replies(f"{gateway}-1")


def links_to(address: ReplyAddress, pool: str = "cpu", clock: Callable[[], float] = time.monotonic) -> ReplyLinks[int]:
    """Return links that know the address of the gateway."""
    links = new_links(pool, clock)
    assert not links.send(replies_of(links), b"", 0)
    assert links.wanted == {GATEWAY}
    links.found(GATEWAY, address.encode())
    return links


async def send(links: ReplyLinks[int], message: bytes, token: int) -> None:
    """Send a message as soon as the connection is open."""
    await until(lambda: links.send(replies_of(links), message, token) is Sent.KEPT)


class Outcomes:
    """What became of the replies that were kept."""

    def __init__(self, links: ReplyLinks[int]) -> None:
        self._links = links
        self.delivered: list[int] = []
        self.undelivered: list[int] = []

    def look(self, wait_s: float = 0.0) -> None:
        delivered, undelivered = self._links.settled(wait_s)
        self.delivered += delivered
        self.undelivered += [token for token, _ in undelivered]

    async def until_settled(self) -> None:
        def all_settled() -> bool:
            self.look()
            return not self._links.waiting

        await until(all_settled)


@contextmanager
def connected(listener: ReplyPort) -> Iterator[socket.socket]:
    """A connection that sends what no worker sends."""
    address = listener.address("cpu")
    with socket.create_connection((address.host, address.port), TIMEOUT_S) as link:
        yield link


def exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = link.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def log_in(link: socket.socket, secret: bytes, pool: str = "cpu") -> None:
    hello = exactly(link, len(HELLO) + NONCE_BYTES)
    link.sendall(encode_login(secret, pool, hello[len(HELLO) :], bytes(NONCE_BYTES)))
    exactly(link, PROOF_BYTES)


def ends(link: socket.socket) -> bool:
    """Return whether the other end closes the connection, after what it has sent."""
    try:
        while link.recv(1000):
            pass
    except ConnectionError:
        pass
    return True


def test_replies_of_several_workers_arrive_whole_and_in_order_and_each_has_a_receipt():
    async def test() -> None:
        async with listening() as (listener, received):
            pools = ["cpu", "gpu", "größe"]
            workers = [links_to(listener.address(pool), pool) for pool in pools]
            outcomes = [Outcomes(worker) for worker in workers]
            for n in range(60):
                for k, worker in enumerate(workers):
                    message = b"%d %d " % (k, n) + os.urandom(n * 1000)
                    while not worker.send(replies_of(worker), message, n):
                        outcomes[k].look()
                        await asyncio.sleep(0.001)
            for k, pool in enumerate(pools):
                await outcomes[k].until_settled()
                assert outcomes[k].delivered == list(range(60))
                mine = [reply for of, reply in received if of == pool]
                assert [reply.split(b" ", 2)[:2] for reply in mine] == [[b"%d" % k, b"%d" % n] for n in range(60)]
                assert [len(reply) for reply in mine] == [len(b"%d %d " % (k, n)) + n * 1000 for n in range(60)]
            assert (len(listener.links), len(listener.logins)) == (3, 0)
            for worker in workers:
                worker.close()
            await until(lambda: not listener.links)

    run(test)


def test_a_gateway_without_a_reply_port_is_looked_up_again_later():
    now = 0.0
    links = new_links(clock=lambda: now)
    wrong = (b"garbage", b"\xff", b"00 x 127.0.0.1", b"00 70000 127.0.0.1", b"00 0 127.0.0.1", b"00 80 redis.example")
    for value in (None, *wrong):
        assert not links.send(replies_of(links), b"x", 1)
        assert links.wanted == {GATEWAY}
        links.found(GATEWAY, value)
        assert not links.send(replies_of(links), b"x", 1)
        assert links.wanted == set(), "not with each reply"
        now += TRY_AGAIN_S
    assert not links.waiting


@pytest.mark.parametrize("attack", ["secret of another pool", "wrong secret", "silent", "slow", "huge name", "no name"])
def test_who_does_not_know_the_secret_sends_nothing(attack, monkeypatch):
    monkeypatch.setattr(reply_port, "LOGIN_S_MAX", 0.2)

    async def test() -> None:
        async with listening() as (listener, received):
            secret = listener.secret("gpu") if attack == "secret of another pool" else bytes(32)
            frame = FRAME_HEAD.pack(1) + b"x"

            def intrude() -> bool:
                with connected(listener) as link:
                    hello = exactly(link, len(HELLO) + NONCE_BYTES)
                    pool = {"huge name": "c" * 1000, "no name": ""}.get(attack, "cpu")
                    login = encode_login(secret, pool, hello[len(HELLO) :], bytes(NONCE_BYTES)) + frame
                    if attack == "slow":
                        link.sendall(login[:-10])
                    elif attack != "silent":
                        link.sendall(login)
                    return ends(link)

            assert await asyncio.to_thread(intrude)
            assert received == []
            await until(lambda: not listener.links)

    run(test)


def test_bad_logins_are_counted_and_are_one_warning_a_minute(caplog, monkeypatch):
    """Anybody who reaches the port can send them."""
    monkeypatch.setattr(reply_port, "LOGINS_MAX", 1)
    now = 0.0

    def intrude(listener: ReplyPort) -> None:
        with connected(listener) as link:
            exactly(link, len(HELLO) + NONCE_BYTES)
            link.sendall(bytes(1000))
            assert ends(link)

    async def test() -> None:
        nonlocal now
        listener = ReplyPort(0, lambda *_: None, clock=lambda: now)
        assert listener.listen(HOST)
        for _ in range(20):
            await asyncio.to_thread(intrude, listener)
        with connected(listener):
            await until(lambda: len(listener.logins) == 1)
            with connected(listener) as second:
                assert await asyncio.to_thread(ends, second)
        now = WARN_AGAIN_S
        await until(lambda: not listener.logins)
        await asyncio.to_thread(intrude, listener)
        assert listener.refused == 22
        listener.stop()

    run(test)
    reason = "the last one from 127.0.0.1: the pool of a login has no usable name"
    warnings = [message for message in caplog.messages if "refused" in message]
    assert warnings == [f"{n} connections to the reply port were refused, {reason}" for n in (1, 21)]


def test_a_connection_that_does_not_log_in_in_time_is_counted(monkeypatch, caplog):
    monkeypatch.setattr(reply_port, "LOGIN_S_MAX", 0.01)

    async def test() -> None:
        async with listening() as (listener, _):
            with connected(listener) as link:
                assert await asyncio.to_thread(ends, link)
            assert listener.refused == 1

    run(test)
    assert "it did not log in in time" in caplog.text


def test_a_server_that_does_not_know_the_secret_gets_no_reply():
    """It took the port of a gateway that has ended, say."""

    async def test() -> None:
        got = bytearray()

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HELLO + bytes(NONCE_BYTES))
            got.extend(await reader.read(1000))
            writer.write(bytes(PROOF_BYTES))
            got.extend(await reader.read(1000))
            writer.close()

        server = await asyncio.start_server(impostor, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        links = links_to(ReplyAddress(HOST, port, bytes(32)))
        assert not links.send(replies_of(links), b"secret outputs", 1)
        await until(lambda: links.send(replies_of(links), b"secret outputs", 1) is not None or bool(links._away))
        assert (bool(links._away), links.waiting) == (True, False)
        assert b"secret outputs" not in got
        server.close()

    run(test)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), b"", b"ms"])
def test_another_service_on_the_port_is_left_alone(answer):
    async def test() -> None:
        async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(service, HOST, 0)
        links = links_to(ReplyAddress(HOST, server.sockets[0].getsockname()[1], bytes(32)))
        await until(lambda: links.send(replies_of(links), b"x", 1) is not None or bool(links._away))
        assert (bool(links._away), links.waiting) == (True, False)
        server.close()

    run(test)


def test_a_port_that_nobody_answers_costs_no_time(monkeypatch):
    monkeypatch.setattr(reply_links, "LOGIN_S_MAX", 0.2)

    async def test() -> None:
        with socket.create_server((HOST, 0), backlog=0) as server:  # accepts nothing
            port = server.getsockname()[1]
            links = links_to(ReplyAddress(HOST, port, bytes(32)))
            for _ in range(100):
                assert not links.send(replies_of(links), b"x", 1)
            assert links.wanted == {GATEWAY}, "a thread logs in, and no other one begins"
            await until(lambda: not links.wanted)
            assert not links.send(replies_of(links), b"x", 1)
            assert links.wanted == set(), "it is away for a while"
        refused = links_to(ReplyAddress(HOST, port, bytes(32)))  # the port is closed now
        await until(lambda: not refused.wanted)
        assert not refused.send(replies_of(refused), b"x", 1)
        assert not refused.waiting

    run(test)


def test_what_a_gateway_does_not_read_is_bounded_and_sent_again():
    now = 0.0

    async def test() -> None:
        nonlocal now
        async with listening() as (listener, received):
            links = links_to(listener.address("cpu"), clock=lambda: now)
            outcomes = Outcomes(links)
            await send(links, b"first", 0)
            await outcomes.until_settled()
            message = bytes(1000)
            taken = (
                next(n for n in range(1, 100_000) if not links.send(replies_of(links), message, n)) - 1
            )  # no turn of the loop
            assert taken == UNCONFIRMED_BYTES_MAX // 1000
            now += RECEIPT_S_MAX + 1
            outcomes.look()
            assert outcomes.delivered == [0]
            assert outcomes.undelivered == list(range(1, taken + 1))
            assert not links.waiting
            await until(lambda: not listener.links)
            assert set(received.replies) <= {b"first", message}

    run(test)


def test_connections_of_gateways_that_have_ended_are_closed():
    async def test() -> None:
        links = new_links()
        for n in range(5):  # each restart of a gateway gives it another name
            name = f"0-{n}-ab"
            async with listening() as (listener, _):
                replies = replies_of(links, name)
                assert not links.send(replies, b"x", n)
                links.found(name, listener.address("cpu").encode())
                await until(lambda replies=replies, n=n: links.send(replies, b"x", n) is Sent.KEPT)  # type: ignore[misc]
                await Outcomes(links).until_settled()
        assert len(links._links) <= 2

    run(test)


def test_what_was_sent_to_a_gateway_that_ends_is_sent_again():
    async def test() -> None:
        async with listening() as (listener, _):
            links = links_to(listener.address("cpu"))
            outcomes = Outcomes(links)
            await send(links, b"1", 1)
            await outcomes.until_settled()
            assert links.send(replies_of(links), b"2", 2)
        links.send(replies_of(links), b"3", 3)
        await outcomes.until_settled()
        assert outcomes.delivered[0] == 1
        assert {2} <= {*outcomes.delivered, *outcomes.undelivered}
        assert not links.send(replies_of(links), b"4", 4)

    run(test)


@pytest.mark.parametrize(
    "wrong",
    [FRAME_HEAD.pack(MESSAGE_BYTES_MAX + 1), FRAME_HEAD.pack(7) + b"garbage", FRAME_HEAD.pack(2**32 - 1) + b"x"],
    ids=["too large", "no reply", "huge"],
)
def test_a_worker_that_sends_what_is_no_reply_loses_its_connection_and_only_that(wrong, caplog):
    received = Received()

    def take(pool: str, reply: bytes) -> None:
        if reply == b"garbage":
            raise ValueError("not one")
        received.append((pool, reply))

    async def test() -> None:
        async with listening(take) as (listener, _):

            def intrude() -> bytes:
                with connected(listener) as link:
                    log_in(link, listener.secret("cpu"))
                    link.sendall(FRAME_HEAD.pack(4) + b"good" + wrong + FRAME_HEAD.pack(4) + b"late")
                    receipt = b""
                    try:
                        while more := link.recv(100):
                            receipt += more
                    except ConnectionError:
                        pass
                    return receipt

            receipt = await asyncio.to_thread(intrude)
            assert receipt in {b"", RECEIPT.pack(1)}
            assert received.replies == [b"good"]
            links = links_to(listener.address("cpu"))
            await send(links, b"another worker's", 1)
            await Outcomes(links).until_settled()
            assert received.replies == [b"good", b"another worker's"]

    run(test)
    assert "the connection of a worker on another host is closed" in caplog.text


def test_a_reply_that_was_half_sent_is_none():
    async def test() -> None:
        async with listening() as (listener, received):

            def die() -> None:
                with connected(listener) as link:
                    log_in(link, listener.secret("cpu"))
                    for byte in FRAME_HEAD.pack(3) + b"one" + FRAME_HEAD.pack(100) + b"half":
                        link.sendall(bytes((byte,)))
                    assert exactly(link, RECEIPT.size) == RECEIPT.pack(1)

            await asyncio.to_thread(die)
            await until(lambda: not listener.links)
            assert received.replies == [b"one"]

    run(test)


def test_a_gateway_that_claims_more_than_was_sent_is_left():
    async def test() -> None:
        async with listening() as (listener, _):
            links = links_to(listener.address("cpu"))
            await send(links, b"1", 1)
            [link] = listener.links
            link._taken = 5  # type: ignore[attr-defined]  # of a gateway with a defect
            outcomes = Outcomes(links)
            await outcomes.until_settled()
            assert (outcomes.delivered, outcomes.undelivered) == ([], [1])

    run(test)


def test_connections_are_bounded_at_both_ends(monkeypatch):
    monkeypatch.setattr(reply_port, "LOGINS_MAX", 2)
    monkeypatch.setattr(reply_links, "LINKS_MAX", 3)

    async def test() -> None:
        async with listening() as (listener, _):
            with connected(listener) as one, connected(listener) as two:
                await until(lambda: len(listener.logins) == 2)
                with connected(listener) as third:
                    assert await asyncio.to_thread(ends, third)
                for link in (one, two):
                    await asyncio.to_thread(log_in, link, listener.secret("cpu"))
                await until(lambda: not listener.logins)
                links = links_to(listener.address("cpu"))
                await send(links, b"1", 1)
                for n in range(10):  # gateways of earlier starts
                    assert not links.send(replies_of(links, f"gone-{n}"), b"x", n)
                    assert len(links.wanted) <= 3
                outcomes = Outcomes(links)
                await outcomes.until_settled()
                assert [*outcomes.delivered, *outcomes.undelivered] == [1]

    run(test)


def test_a_worker_that_reads_no_receipts_loses_its_connection():
    async def test() -> None:
        async with listening() as (listener, received):
            logged_in = threading.Event()

            def fill() -> None:
                address = listener.address("cpu")
                with socket.socket() as link:
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                    link.connect((address.host, address.port))
                    log_in(link, listener.secret("cpu"))
                    logged_in.set()
                    with suppress(ConnectionError):
                        while True:
                            link.sendall(FRAME_HEAD.pack(1) + b"x")

            filling = asyncio.create_task(asyncio.to_thread(fill))
            await until(logged_in.is_set)
            [link] = listener.links
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            await filling
            await until(lambda: not listener.links)
            assert set(received.replies) == {b"x"}

    run(test)


def neighbouring_ports() -> int:
    """Return a free port after which there is another one."""
    while True:
        port = free_port()
        with suppress(OSError), socket.socket() as other:
            other.bind((HOST, port + 1))
            return port


def test_gateways_of_one_host_share_a_range_of_ports(monkeypatch, caplog):
    monkeypatch.setattr(reply_port, "PORTS_TRIED", 2)

    async def test() -> None:
        port = neighbouring_ports()
        async with listening(port=port) as (first, _):
            assert first.address("cpu").port == port
            async with listening(port=port) as (second, _):
                assert second.address("cpu").port == port + 1
                third = ReplyPort(port, lambda *_: None)
                assert not third.listen(HOST)
            assert second.secret("cpu") != first.secret("cpu") != first.secret("gpu")

    run(test)
    assert "come through Redis: no port on 127.0.0.1" in caplog.text


def test_links_over_ipv6():
    with closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            assert "CI" not in os.environ or error.errno == 99, "this machine has IPv6, or says that it has none"
            return

    async def test() -> None:
        received = Received()
        listener = ReplyPort(0, lambda pool, reply: received.append((pool, reply)))
        assert listener.listen("::1")
        links = links_to(listener.address("cpu"))
        await send(links, b"1", 1)
        await Outcomes(links).until_settled()
        assert received == [("cpu", b"1")]
        listener.stop()

    run(test)


STEPS = st.lists(
    st.sampled_from(["send", "large", "look", "turn", "gateway drops", "worker drops", "late"]), min_size=1, max_size=60
)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_each_reply_that_was_kept_is_settled_once(steps):
    """Delivered means that the gateway has it; what it has may be sent again, but is not lost."""
    now = 0.0

    async def test() -> None:
        nonlocal now
        async with listening() as (listener, received):
            links: Any = links_to(listener.address("cpu"), clock=lambda: now)
            outcomes, kept = Outcomes(links), []
            for n, step in enumerate(steps):
                if step in {"send", "large"}:
                    message = b"%d " % n + bytes(60_000 if step == "large" else 0)
                    if links.send(replies_of(links), message, n):
                        kept.append(n)
                elif step == "look":
                    outcomes.look()
                elif step == "turn":
                    await asyncio.sleep(0.001)
                elif step == "gateway drops":
                    for link in [*listener.links]:
                        link.close()
                elif step == "worker drops":
                    links.close()
                else:
                    now += RECEIPT_S_MAX + TRY_AGAIN_S
                for gateway in [*links.wanted]:
                    links.found(gateway, listener.address("cpu").encode())
            await outcomes.until_settled()
            assert sorted([*outcomes.delivered, *outcomes.undelivered]) == kept
            have = [int(reply.split(b" ", 1)[0]) for reply in received.replies]
            assert set(outcomes.delivered) <= set(have) <= set(kept)
            assert len(have) == len(set(have))

    run(test)
