"""The two connections of our own to Redis: the worker's blocking link and the gateway's pipeline, on a real server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hiredis
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.queue.consumer_link import CommandRefused, ConsumerLink
from millstream.services.queue.pipeline import connect, handshake_commands
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit.redis_server import redis_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisAddress]:
    with redis_server(choose_binary(""), tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture
def locked(server: RedisAddress) -> Iterator[RedisAddress]:
    """The server, asking for a password; its right address."""
    with client(server) as redis:
        redis.config_set("requirepass", "se cret")
        right = RedisAddress.parse(f"unix://:se%20cret@{server.path}?db=3")
        yield right
    with client(right) as redis:
        redis.config_set("requirepass", "")


def test_the_greeting_says_who_we_are_and_which_database():
    assert handshake_commands(RedisAddress.parse("redis://host")) == []
    assert handshake_commands(RedisAddress.parse("redis://:p@host/0")) == [("AUTH", "p")]
    assert handshake_commands(RedisAddress.parse("redis://u:p@host/2")) == [("AUTH", "u", "p"), ("SELECT", "2")]


def test_commands_may_be_sent_before_replies_are_read(server):
    link = ConsumerLink(server)
    link.send(("SET", b"key", b"\0\xff"))
    link.send(("GET", "key"))
    assert (link.receive(), link.receive(), link.call("INCRBY", "n", 5)) == (b"OK", b"\0\xff", 5)
    link.close()


@pytest.mark.parametrize("spin_s", [1e-6, 60])
def test_a_reply_that_is_looked_for_is_the_one_that_is_slept_for(server, spin_s):
    link, other = ConsumerLink(server), ConsumerLink(server)
    link.send(("BLPOP", "list", 0))
    other.call("RPUSH", "list", "x")
    assert link.receive(spin_s) == [b"list", b"x"]
    link.send(("PING",))
    link.close()
    with pytest.raises(Failure):
        link.receive(spin_s)
    other.close()


def test_a_reply_larger_than_one_read_arrives_whole(server):
    link = ConsumerLink(server)
    link.call("SET", "large", bytes(range(256)) * 8192)
    assert link.call("GET", "large") == bytes(range(256)) * 8192
    link.close()


def test_password_and_database_of_both(locked):
    link = ConsumerLink(locked)
    link.call("SET", "where", "three")
    link.close()

    async def get() -> Any:
        pipeline = await connect(locked)
        value = await pipeline.call("GET", "where")
        pipeline.close()
        return value

    assert asyncio.run(get()) == b"three"


def test_a_refused_password_leaves_no_connection(locked):
    assert locked.path is not None
    wrong = RedisAddress.parse(f"unix://:wrong@{locked.path}")
    with pytest.raises(Failure, match="WRONGPASS") as failure:
        ConsumerLink(wrong)
    assert failure.value.code is Code.UNAVAILABLE
    with pytest.raises(hiredis.ReplyError, match="WRONGPASS"):
        asyncio.run(connect(wrong))


def test_a_server_that_is_not_there_is_a_failure(tmp_path):
    with pytest.raises(Failure, match="not reachable") as failure:
        ConsumerLink(RedisAddress.unix(str(tmp_path / "no.sock")))
    assert failure.value.code is Code.UNAVAILABLE


def answering(path: Path, answer: bytes) -> threading.Thread:
    """A server that gives one client one answer and hangs up."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def serve() -> None:
        connection, _ = listener.accept()
        with listener, connection:
            connection.recv(100)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("answer", "message"), [(b"", "closed"), (b"$10\r\nabc", "closed"), (b"nonsense\r\n", "lost: Protocol error")]
)
def test_a_connection_that_ends_or_talks_nonsense_is_a_failure(tmp_path, answer, message):
    thread = answering(tmp_path / "s", answer)
    link = ConsumerLink(RedisAddress.unix(str(tmp_path / "s")))
    with pytest.raises(Failure, match=message) as failure:
        link.call("PING")
    assert failure.value.code is Code.UNAVAILABLE
    link.close()
    thread.join()


def test_a_server_that_does_not_answer_is_a_failure(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        link = ConsumerLink(RedisAddress.unix(str(tmp_path / "s")), timeout_s=0.01)
        with pytest.raises(Failure, match="lost"):
            link.call("PING")
        link.close()


def test_a_pipeline_does_not_wait_for_ever_to_be_connected(tmp_path, monkeypatch):
    monkeypatch.setattr("millstream.services.queue.url.REPLY_S_MAX", 0.01)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        with pytest.raises(TimeoutError):
            asyncio.run(connect(RedisAddress.parse(f"unix://:password@{tmp_path / 's'}")))


def test_an_error_of_redis_is_a_failure(server):
    link = ConsumerLink(server)
    with pytest.raises(Failure, match="Redis answered: ERR unknown command"):
        link.call("NONSENSE")
    assert link.call("PING") == b"PONG"
    link.close()


def test_an_error_is_told_by_its_whole_code(server):
    """BUSYGROUP refuses a command; BUSY is a state of the server."""
    link = ConsumerLink(server)
    create = ("XGROUP", "CREATE", "told-by-its-code", "group", "$", "MKSTREAM")
    assert link.call(*create) == b"OK"
    with pytest.raises(CommandRefused) as refused:
        link.call(*create)
    assert refused.value.error_code == "BUSYGROUP"
    assert link.call("DEL", create[2]) == 1
    link.close()


def refuse(_: Any) -> None:
    raise ValueError("my own mistake")


def test_replies_come_in_order_and_a_callback_that_raises_takes_none_from_the_others(server, caplog):
    replies: list[Any] = []

    async def talk() -> None:
        pipeline = await connect(server)
        sent = pipeline.send((b"SET", b"a", b"1"), replies.append)
        assert sent == len(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n")
        pipeline.send((b"INCR", b"a"), refuse)
        pipeline.send((b"INCR", b"a"))
        pipeline.send((b"HGET", b"a", b"f"), replies.append)
        assert await pipeline.call("INCR", "a") == 4
        assert pipeline.connected
        assert pipeline.buffered_bytes == 0
        pipeline.close()

    asyncio.run(talk())
    assert replies[0] == b"OK"
    assert isinstance(replies[1], hiredis.ReplyError)
    assert "my own mistake" in caplog.text


def test_when_the_connection_is_lost_everybody_is_told(server, caplog):
    async def talk() -> list[Any]:
        told: list[Any] = []
        lost = asyncio.Event()
        pipeline = await connect(server, lost.set)
        number = await pipeline.call("CLIENT", "ID")
        waiting = asyncio.create_task(pipeline.call("BLPOP", "nothing", 0))
        await asyncio.sleep(0)
        pipeline.send((b"PING",), refuse)
        pipeline.send((b"PING",), told.append)
        other = await connect(server)
        await other.call("CLIENT", "KILL", "ID", number)
        other.close()
        await lost.wait()
        with pytest.raises(Failure, match="was lost"):
            await waiting
        assert not pipeline.connected
        assert pipeline.buffered_bytes == 0
        with pytest.raises(Failure, match="not reachable"):
            pipeline.send((b"PING",))
        return told

    [told] = asyncio.run(talk())
    assert (told.code, told.retry_after_s) == (Code.UNAVAILABLE, 1)
    assert "my own mistake" in caplog.text


@pytest.fixture
def demoted(server: RedisAddress) -> Iterator[Callable[[], None]]:
    """Make the server a replica, of a master that is not there, until the test ends."""
    with client(server) as redis:
        yield lambda: redis.replicaof("127.0.0.1", 1)
        redis.replicaof("NO", "ONE")
        redis.config_set("replica-serve-stale-data", "yes")


@pytest.mark.parametrize("stale", ["yes", "no"])  # as a replica without its master it refuses writes, or everything
@pytest.mark.parametrize("words", [("SET", "key", "v"), ("EVAL", "return redis.call('SET', KEYS[1], 'v')", 1, "key")])
def test_a_server_that_becomes_a_replica_is_as_good_as_lost(server, demoted, stale, words):
    async def talk() -> list[Any]:
        told: list[Any] = []
        lost = asyncio.Event()
        pipeline = await connect(server, lost.set)
        assert await pipeline.call(*words) in {b"OK", None}
        demoted()
        pipeline.send(words, told.append)
        pipeline.send((b"PING",), told.append)
        await asyncio.wait_for(lost.wait(), 120)
        assert not pipeline.connected
        return told

    with client(server) as redis:
        redis.config_set("replica-serve-stale-data", stale)
    assert [failure.code for failure in asyncio.run(talk())] == [Code.UNAVAILABLE] * 2
    link = ConsumerLink(server)
    with pytest.raises(Failure, match=r"READONLY|MASTERDOWN") as failure:
        link.call(*words)
    assert failure.value.code is Code.UNAVAILABLE
    link.close()


def test_a_call_that_nobody_waits_for_any_more_does_not_disturb_the_next(server):
    async def talk() -> Any:
        pipeline = await connect(server)
        waiting = asyncio.create_task(pipeline.call("ECHO", "one"))
        await asyncio.sleep(0)
        waiting.cancel()
        two = await pipeline.call("ECHO", "two")
        pipeline.close()
        return two

    assert asyncio.run(talk()) == b"two"
