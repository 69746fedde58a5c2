"""Tensors too large for a script, on servers with every limit: they pass, or become an error, and are never sent for
ever.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.queue.blob import PART_BYTES_MAX
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.sharing import Share
from millstream.services.queue.url import RedisAddress
from millstream.services.wire.batch import decode_reply
from millstream.workers.batches.consumer import Consumer, Finished
from millstream.workers.batches.lease import LOSSES_MAX, Lease
from tests.kit.pool import Pool

MIB = 1 << 20


@contextmanager
def configured(pool: Pool, **settings: object) -> Iterator[None]:
    before = {name: pool.redis.config_get(name)[name] for name in (key.replace("_", "-") for key in settings)}
    for name, value in settings.items():
        pool.redis.config_set(name.replace("_", "-"), str(value))
    try:
        yield
    finally:
        for name, value in before.items():
            pool.redis.config_set(name, value)


def one_lease(pool: Pool, blob: bytes = b"") -> Lease:
    pool.join("w", "m")
    pool.put("m", "b1", blob=blob)
    [lease] = pool.next("w")
    return lease


def failures(reply: bytes) -> dict[int, list[str]]:
    decoded = decode_reply(reply)
    assert not isinstance(decoded, str)
    return decoded[0].failures


def test_the_lowest_limits_of_a_server_let_any_blob_pass(pool):
    data = os.urandom(9 * PART_BYTES_MAX + 7) * 3  # above both limits, and more parts than are read at a time
    with configured(pool, proto_max_bulk_len=MIB, client_query_buffer_limit=MIB):
        lease = one_lease(pool, blob=data)
        assert bytes(lease.inline) == data
        worker = pool.worker("w")
        worker.send_next([Finished(lease, b"one", data)], 0, 0)
        worker.receive_next()
        assert pool.replies() == [b"one"]
        assert pool.blob("reply-b1-1") == data
        assert 0 < pool.redis.ttl(pool.keys.blob("reply-b1-1")) <= 60


def test_a_gateway_sends_and_takes_any_blob_too(pool):
    data = os.urandom(33 * PART_BYTES_MAX)

    async def there_and_back() -> tuple[bytes, bytes, list[object]]:
        answers: list[object] = []
        link = ProducerLink(
            pool.address, pool.keys, "g9", lambda _: None, lambda _: None, lambda _, reply: answers.append(reply)
        )
        await link.start()
        link.put("m", "big", b"entry", data, 1e12, 1, Share(1.0, 1.0))
        found = await link.take_blob("big")
        again = await link.take_blob("big")
        await link.stop()
        return found, again, answers

    with configured(pool, proto_max_bulk_len=MIB, client_query_buffer_limit=MIB):
        found, again, answers = asyncio.run(there_and_back())
    assert (found == data, again) == (True, b"")
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    pool.clear()


def test_outputs_that_redis_has_no_memory_for_become_an_error_and_the_worker_goes_on(pool):
    lease = one_lease(pool)
    worker = pool.worker("w")
    with configured(pool, maxmemory=int(pool.redis.info("memory")["used_memory"]) + 4 * MIB):
        worker.send_next([Finished(lease, b"one", bytes(64 * MIB))], 0, 0)
        assert worker.receive_next() == []
        [reply] = pool.replies()
        [(code, message)] = failures(reply).values()
        assert code == Code.UNAVAILABLE
        assert "OOM" in message
        assert pool.check().entries == []
        assert not pool.redis.exists(pool.keys.blob("reply-b1-1"))
    pool.put("m", "b2")
    [lease] = pool.next("w")
    pool.next("w", lease)
    assert pool.replies() == [b"b2 1 w"]


def test_a_put_that_redis_has_no_memory_for_is_told_so(pool):
    pool.join("w", "m")

    async def put() -> list[str]:
        refused: list[str] = []

        def on_put(name: str, reply: object) -> None:
            if isinstance(reply, Exception):
                refused.append(f"{name} {reply}")

        link = ProducerLink(pool.address, pool.keys, "g9", lambda _: None, lambda _: None, on_put)
        await link.start()
        link.put("m", "big", b"entry", bytes(64 * MIB), 1e12, 1, Share(1.0, 1.0))
        await link.call("PING")
        assert link.connected
        await link.stop()
        return refused

    with configured(pool, maxmemory=int(pool.redis.info("memory")["used_memory"]) + 4 * MIB):
        refused = asyncio.run(put())
    assert refused
    assert refused[0].startswith("big OOM")
    pool.clear()


class Proxy:
    """Stands before a server and ends each connection that sends more than `bytes_max` bytes, as some proxies do."""

    def __init__(self, server: str, path: Path, bytes_max: int) -> None:
        self._server = server
        self._bytes_max = bytes_max
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.ended = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, server = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
                self._sockets += (client, server)
                server.connect(self._server)
                self._start(self._forward, client, server, self._bytes_max)
                self._start(self._forward, server, client, 1 << 60)

    def _forward(self, source: socket.socket, sink: socket.socket, left: int) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                left -= len(data)
                if left < 0:
                    self.ended += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()


def test_outputs_at_which_a_connection_breaks_each_time_become_an_error(pool, tmp_path):
    lease = one_lease(pool)
    proxy = Proxy(pool.address.path, tmp_path / "proxy", 256 * 1024)
    sent = 0
    while not pool.redis.llen(pool.keys.replies("g0")):
        sent += 1
        assert sent <= LOSSES_MAX + 1, "it is not sent for ever"
        worker = Consumer(RedisAddress.unix(str(tmp_path / "proxy")), pool.keys, "w", pool.clock)
        try:
            worker.send_next([Finished(lease, b"one", bytes(MIB))], 0, 0)
            worker.receive_next()
        except Failure as failure:
            assert failure.code is Code.UNAVAILABLE
        finally:
            worker.close()
    proxy.close()
    assert (sent, proxy.ended) == (LOSSES_MAX + 1, LOSSES_MAX)
    [reply] = pool.replies()
    assert failures(reply) == {0: ["unavailable", "the connection to Redis broke each time the outputs were sent"]}
    assert pool.check().entries == []
