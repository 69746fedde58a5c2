"""One pipelined asyncio connection to Redis: commands go out at once, replies come back in order to callbacks.

Why not redis-py here: parsing and packing in C, and no task, future or lock for a command, carry twice the batches
for a CPU second. Everything that is not the hot path uses redis-py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from millstream.services.errors import Code, Failure
from millstream.services.queue.handshake import check_reply, greeting
from millstream.services.queue.url import RedisAddress, locate_async

log = logging.getLogger("millstream.queue")

OnReply = Callable[[Any], None]
#: what Redis answers when it was a master and is a replica now
_DEMOTED = ("READONLY", "MASTERDOWN")


class Pipeline(asyncio.Protocol):
    """Each command has a callback; it gets the reply, or an Exception (a Redis error, or the loss of the connection).

    A server that says that it became a replica is as good as lost: none of the commands after that one is done either.
    What a callback raises is logged: the replies behind it are other people's.
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
    def buffered_bytes(self) -> int:
        """Bytes that Redis has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        lost = Failure(Code.UNAVAILABLE, "the connection to Redis was lost", retry_after_s=1)
        callbacks, self._callbacks = self._callbacks, deque()
        for callback in callbacks:
            if callback is not None:
                _tell(callback, lost)
        if self._on_lost is not None:
            self._on_lost()

    def send(self, words: tuple[bytes | str | int, ...], on_reply: OnReply | None = None) -> int:
        """Send one command; returns its bytes on the wire. Raises Failure(UNAVAILABLE) without a connection."""
        transport = self._transport
        if transport is None:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable", retry_after_s=1)
        packed = hiredis.pack_command(cast("Any", words))
        self._callbacks.append(on_reply)
        transport.write(packed)
        return len(packed)

    def send_packed(self, packed: bytes, on_replies: Sequence[OnReply]) -> None:
        """Send commands that are packed already, in one go; each has its callback. Raises as `send` does."""
        if self._transport is None:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable", retry_after_s=1)
        self._callbacks.extend(on_replies)
        self._transport.write(packed)

    async def call(self, *words: bytes | str | int) -> Any:
        """Send one command and wait for its reply. Raises what Redis answered, or Failure(UNAVAILABLE)."""
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
                log.warning("Redis takes no writes any more: %s", reply)
                self.close()
                return
            callback = callbacks.popleft()
            if callback is not None:
                _tell(callback, reply)

    def close(self) -> None:
        """What was not written yet is dropped: who is on the other side may never take it."""
        if self._transport is not None:
            self._transport.abort()


def _tell(callback: OnReply, reply: Any) -> None:
    try:
        callback(reply)
    except Exception:
        log.exception("a reply of Redis could not be used")


async def connect(address: RedisAddress, on_lost: Callable[[], None] | None = None) -> Pipeline:
    """Open a connection, authenticate, choose the database.

    Raises OSError, also after the address's `reply_s_max` seconds, Failure or what Redis answered.
    """
    place = await locate_async(address)
    async with asyncio.timeout(address.reply_s_max):
        protocol = await _open(place, on_lost)
        try:
            for words in greeting(address):
                check_reply(words, await protocol.call(*words))
        except BaseException:
            protocol.close()
            raise
        return protocol


async def _open(place: RedisAddress, on_lost: Callable[[], None] | None) -> Pipeline:
    loop = asyncio.get_running_loop()

    def factory() -> Pipeline:
        return Pipeline(on_lost)

    if place.path is not None:
        _, protocol = await loop.create_unix_connection(factory, place.path)
    else:
        _, protocol = await loop.create_connection(factory, place.host, place.port, ssl=place.ssl_context())
    return protocol
