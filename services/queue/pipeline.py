"""A pipelined asyncio connection to Redis: commands are sent at once, callbacks receive the replies in order.

It parses and packs in C and needs no task, future or lock per command: twice as many batches per CPU second as with
redis-py. Everything outside the hot path uses redis-py.

The Redis clock is the clock that all processes of an installation share; the clocks of their machines may differ. It is
computed as this process' monotonic clock plus an offset. The offset is measured with TIME: Redis reads its clock
between request and reply. Each measurement narrows the interval that contains the offset, and passing time widens the
interval again (Marzullo and Owicki, 1983).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from millstream.services.errors import Code, Failure
from millstream.services.queue.sentinel import NOT_A_MASTER, is_master
from millstream.services.queue.url import RedisAddress, locate_async

#: Bound on how fast two clocks drift apart: NTP slews by at most 500 parts per million, and each clock may be slewed.
DRIFT = 0.001


class RedisClock:
    """An estimate of the Redis clock; this machine's wall clock until the first measurement. Thread-safe."""

    def __init__(self) -> None:
        self.offset_ms = (time.time() - time.monotonic()) * 1000  # Redis clock - monotonic clock  # noqa: TID251
        self._lock = threading.Lock()
        self._low, self._high = float("-inf"), float("inf")  # bounds of the offset (s) at `_measured_at`
        self._measured_at = 0.0  # monotonic

    def now_ms(self) -> float:
        """Return milliseconds since the epoch on the Redis clock."""
        return time.monotonic() * 1000 + self.offset_ms

    def record_measurement(self, sent: float, received: float, reply: Sequence[bytes | int]) -> None:
        """Narrow the offset by one reading of the Redis clock.

        Args:
            sent: when the command was sent (monotonic seconds).
            received: when its reply had arrived.
            reply: seconds and microseconds, as TIME returns them, also inside a script.
        """
        redis_s = int(reply[0]) + int(reply[1]) / 1e6
        low, high = redis_s - received, redis_s - sent
        with self._lock:
            widened_s = max(0.0, received - self._measured_at) * DRIFT
            known_low, known_high = max(low, self._low - widened_s), min(high, self._high + widened_s)
            # If the intervals do not overlap, a clock was set, or this is another server.
            self._low, self._high = (known_low, known_high) if known_low <= known_high else (low, high)
            self._measured_at = max(self._measured_at, received)
            self.offset_ms = (self._low + self._high) * 500


log = logging.getLogger("millstream.queue")

OnReply = Callable[[Any], None]
#: What Redis answers after it was demoted from master to replica.
_DEMOTED = ("READONLY", "MASTERDOWN")


_ROLE = ("ROLE",)


def handshake_commands(address: RedisAddress) -> list[tuple[str, ...]]:
    """Return the commands to send, in order, before any other. A new connection speaks RESP2 and keeps it."""
    commands: list[tuple[str, ...]] = []
    if address.password is not None:
        user = (address.username,) if address.username else ()
        commands.append(("AUTH", *user, address.password))
    if address.db:
        commands.append(("SELECT", str(address.db)))
    if address.sentinels is not None:
        commands.append(_ROLE)
    return commands


def check_reply(words: tuple[str, ...], reply: Any) -> None:
    """Check the reply to a command of `handshake_commands`.

    Raises Failure(UNAVAILABLE) if the sentinels named this server as the master, but it is not one.
    """
    if words == _ROLE and not is_master(reply):
        raise Failure(Code.UNAVAILABLE, NOT_A_MASTER, retry_after_s=1)


class Pipeline(asyncio.Protocol):
    """Calls the callback of each command with its reply, or with an Exception: a Redis error or a lost connection.

    When the server answers that it has become a replica, the connection is closed: the commands that follow would fail
    too. An exception in a callback is logged, so that the replies after it still reach their callbacks.
    """

    def __init__(self, on_lost: Callable[[], None] | None = None) -> None:
        self._reader = hiredis.Reader()
        self._callbacks: deque[OnReply | None] = deque()
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @property
    def local_host(self) -> str | None:
        """The address of this host that the server sees; None: the connection is encrypted, or not between hosts."""
        if self._transport is None or self._transport.get_extra_info("ssl_object") is not None:
            return None
        name = self._transport.get_extra_info("sockname")
        return name[0] if isinstance(name, tuple) else None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were sent here but not yet accepted by the socket."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        lost = Failure(Code.UNAVAILABLE, "the connection to Redis was lost", retry_after_s=1)
        callbacks, self._callbacks = self._callbacks, deque()
        for callback in callbacks:
            if callback is not None:
                _call(callback, lost)
        if self._on_lost is not None:
            self._on_lost()

    def send(self, words: tuple[bytes | str | int, ...], on_reply: OnReply | None = None) -> int:
        """Send a command; returns its size in bytes. Raises Failure(UNAVAILABLE) without a connection."""
        transport = self._transport
        if transport is None:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable", retry_after_s=1)
        packed = hiredis.pack_command(cast("Any", words))
        self._callbacks.append(on_reply)
        transport.write(packed)
        return len(packed)

    def send_packed(self, packed: bytes, on_replies: Sequence[OnReply]) -> None:
        """Send several packed commands in one write, with a callback for each. Raises as `send` does."""
        if self._transport is None:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable", retry_after_s=1)
        self._callbacks.extend(on_replies)
        self._transport.write(packed)

    async def call(self, *words: bytes | str | int) -> Any:
        """Send a command and wait for its reply. Raises the error that Redis answers, or Failure(UNAVAILABLE)."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def resolve(reply: Any) -> None:
            if not future.done():
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)

        self.send(words, resolve)
        return await future

    def data_received(self, data: bytes) -> None:
        reader, callbacks = self._reader, self._callbacks
        reader.feed(data)
        while (reply := reader.gets()) is not False:
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(_DEMOTED):
                log.warning("Redis no longer takes writes: %s", reply)
                self.close()
                return
            callback = callbacks.popleft()
            if callback is not None:
                _call(callback, reply)

    def close(self) -> None:
        """Close at once and drop what was not written: the server may never accept it."""
        if self._transport is not None:
            self._transport.abort()


def _call(callback: OnReply, reply: Any) -> None:
    try:
        callback(reply)
    except Exception:
        log.exception("handling a reply of Redis failed")


async def connect(address: RedisAddress, on_lost: Callable[[], None] | None = None) -> Pipeline:
    """Open a connection, log in and select the database.

    Raises OSError, also after the address's `reply_s_max` seconds; Failure; or the error that Redis answers.
    """
    located = await locate_async(address)
    async with asyncio.timeout(address.reply_s_max):
        protocol = await _open(located, on_lost)
        try:
            for words in handshake_commands(address):
                check_reply(words, await protocol.call(*words))
        except BaseException:
            protocol.close()
            raise
        return protocol


async def _open(address: RedisAddress, on_lost: Callable[[], None] | None) -> Pipeline:
    loop = asyncio.get_running_loop()

    def factory() -> Pipeline:
        return Pipeline(on_lost)

    if address.path is not None:
        _, protocol = await loop.create_unix_connection(factory, address.path)
    else:
        _, protocol = await loop.create_connection(factory, address.host, address.port, ssl=address.ssl_context())
    return protocol
