"""The gateway's connections to the Redis of one pool: one for batches out, one that blocks for replies.

It reconnects with bounded back-off for as long as it lives, and says when Redis is back and whether its data is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import hiredis

from millstream.services.errors import Code, Failure
from millstream.services.queue.blob import is_last, read_command, write_commands
from millstream.services.queue.clock import RedisClock
from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.pipeline import Pipeline, connect
from millstream.services.queue.scripts import script, script_call
from millstream.services.queue.url import RedisAddress

log = logging.getLogger("millstream.queue")

REPLIES_AT_ONCE = 16
REQUESTS_AHEAD = 16  # for replies; Redis blocks on one, and takes the next by itself when that is served
OLD_S = 60.0
OLD_MAX = 100
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0
BLOB_LIFE_MS = 60_000
EPOCH_LIFE_S = 86_400
BUFFERED_BYTES_MAX = 64 << 20


class ProducerLink:
    """Batches of one gateway to one pool.

    `on_reply(data)`: a reply. `on_restored(lost)`: connected; `lost` when Redis has none of what was put before.
    `on_put(name, reply)`: Redis took a batch, or an Exception says why not.
    """

    def __init__(
        self,
        address: RedisAddress,
        keys: PoolKeys,
        gateway: str,
        on_reply: Callable[[bytes], None],
        on_restored: Callable[[bool], None],
        on_put: Callable[[str, Any], None],
    ) -> None:
        self.keys = keys
        self.clock = RedisClock()
        self.replies_key = self.keys.replies(gateway)  # of this connection
        self.sent_bytes = 0
        self.received_bytes = 0
        self.reconnects = 0
        self._gateway = gateway
        self._numbers = itertools.count(1)
        self._address = address
        self._on_reply = on_reply
        self._on_restored = on_restored
        self._on_put = on_put
        self._connected = 0
        self._old: deque[tuple[bytes, float]] = deque(maxlen=OLD_MAX)  # lists of replies of earlier connections, until
        self._put_head = (b"EVALSHA", script("put").sha, len(keys.scheduling) + 1, *keys.scheduling)
        self._asking = b""
        self._asked = 0  # requests for replies that Redis has not answered
        self._out: Pipeline | None = None
        self._replies: Pipeline | None = None
        self._epoch: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._out is not None and self._out.connected

    @property
    def writable(self) -> bool:
        """Whether a batch may be put now: connected, and Redis keeps up with what was sent."""
        out = self._out
        return out is not None and out.connected and out.buffered_bytes < BUFFERED_BYTES_MAX

    def new_name(self) -> str:
        """A name for a batch that no other gateway uses."""
        return f"{self._gateway}-{next(self._numbers):x}"

    async def start(self) -> None:
        """Connect. Raises what the first attempt raises; later losses are repaired in the background."""
        await self._connect()
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._disconnect()

    def put(
        self,
        lane: str,
        name: str,
        entry: bytes,
        blob: bytes,
        deadline_ms: float,
        attempt: int,
        cost_ms: float,
        fill: float,
    ) -> None:
        """Append a batch to its lane's stream. Raises Failure(UNAVAILABLE) while there is no connection.

        `cost_ms`: how long it runs. `fill`: its rows as a part of those that run together.
        """
        out, keys = self._out, self.keys
        if out is None:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable", retry_after_s=1)
        on_put = partial(self._on_put, name)
        if blob:
            # A part that Redis refuses is the end of this batch, whatever it says to the others.
            for command in write_commands(keys.blob(name), blob, BLOB_LIFE_MS):
                self.sent_bytes += out.send(command, on_put)
        self.sent_bytes += out.send(
            (
                *self._put_head, keys.stream(lane), keys.prefix, lane,
                entry, attempt, b"%d" % deadline_ms, self.replies_key, name, b"%.3f" % cost_ms, b"%.3f" % fill,
            ),
            on_put,
        )  # fmt: skip

    def drop_blob(self, name: str) -> None:
        """Remove the tensors of a batch that Redis refused; nobody waits for it, and a lost connection lets them expire."""
        if self._out is not None and self._out.connected:
            self._out.send((b"DEL", self.keys.blob(name)))

    def withdraw(self, lane: str, name: str) -> None:
        """Take a batch that nobody waits for out of a lane that no worker holds; else it would stay for an hour."""
        if self._out is not None and self._out.connected:
            keys = self.keys
            self._out.send(script_call("withdraw", keys, (keys.stream(lane),), lane, name))

    async def take_blob(self, name: str) -> bytes:
        """Read a blob, part by part, and remove it; b"" if it is not there. Raises as `call` does."""
        key = self.keys.blob(name)
        parts: list[bytes] = []
        last = False
        while not last:
            got: list[bytes] = await self.call(*read_command(key, len(parts)))
            parts += got
            last = not got or is_last(got)
        if self._out is not None and self._out.connected:
            self._out.send((b"DEL", key))  # nobody waits for it; what a lost connection leaves expires
        return b"".join(parts)

    async def call(self, *words: bytes | str | int) -> Any:
        """A command on the way of batches. Raises Failure(UNAVAILABLE) or what Redis answers.

        Without an answer in time the connection counts as lost: a server that vanished does not end its connections.
        """
        if self._out is None:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable", retry_after_s=1)
        try:
            async with asyncio.timeout(self._address.reply_s_max):
                return await self._out.call(*words)
        except TimeoutError as error:
            self._lost.set()
            raise Failure(Code.UNAVAILABLE, "Redis does not answer", retry_after_s=1) from error

    async def load_scripts(self) -> None:
        """Make the scripts known to Redis (again)."""
        for name in ("put", "reclaim", "blame", "withdraw"):
            await self.call("SCRIPT", "LOAD", script(name).text)

    async def _connect(self) -> None:
        out = await connect(self._address, self._lost.set)
        try:
            replies = await connect(self._address, self._lost.set)
        except BaseException:
            out.close()
            raise
        self._lost.clear()
        self._out, self._replies = out, replies
        await self.load_scripts()
        await self._measure_clock()
        lost = await self._forgotten()
        self._ask_anew()
        self._listen()
        self._on_restored(lost)

    async def look(self) -> None:
        """Notice a Redis that lost its data while the connection held: it was flushed. Raises as `call` does.

        And forget replies to batches that were put again: workers may have been at them.
        """
        if self._old:
            await self.call("DEL", *(key for key, _ in self._old))
            while self._old and self._old[0][1] <= time.monotonic():
                self._old.popleft()
        await self._measure_clock()
        if await self._forgotten():
            log.warning("Redis at %s lost its data", self._address)
            self._on_restored(True)

    async def _measure_clock(self) -> None:
        asked = time.monotonic()
        redis_time = await self.call("TIME")
        self.clock.measured(asked, time.monotonic(), redis_time)

    async def _forgotten(self) -> bool:
        """Whether Redis has nothing of what was put before."""
        fresh = os.urandom(8).hex().encode()
        key = self.keys.epoch
        epoch: bytes | None = await self.call("GETEX", key, "EX", EPOCH_LIFE_S)
        if epoch is None:
            epoch = await self.call("SET", key, fresh, "NX", "GET", "EX", EPOCH_LIFE_S) or fresh
        known, self._epoch = self._epoch, epoch
        return known is not None and known != epoch

    def _disconnect(self) -> None:
        for pipeline in (self._out, self._replies):
            if pipeline is not None:
                pipeline.close()
        self._out = self._replies = None

    async def _keep(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            await self._lost.wait()
            self._disconnect()
            try:
                await self._connect()
            except (OSError, Failure, hiredis.HiredisError) as error:
                if backoff_s == BACKOFF_S_MIN:
                    log.warning("Redis at %s is not reachable (%s); trying again", self._address, error)
                self._lost.set()
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, BACKOFF_S_MAX)
            else:
                self.reconnects += 1
                backoff_s = BACKOFF_S_MIN
                log.warning("Redis at %s is back", self._address)

    def _ask_anew(self) -> None:
        """Begin a list of replies of its own: Redis may not know yet that the last connection is gone, and serve it."""
        if self._connected:
            self._old.append((self.replies_key, time.monotonic() + OLD_S))
        self._connected += 1
        self.replies_key = self.keys.replies(f"{self._gateway}-{self._connected}")
        ask = (b"BLMPOP", 0, 1, self.replies_key, b"LEFT", b"COUNT", REPLIES_AT_ONCE)
        self._asking = hiredis.pack_command(cast("Any", ask))
        self._asked = 0

    def _listen(self) -> None:
        """Ask for replies, many times in one go: a request for each reply would be a write for each."""
        assert self._replies is not None
        more = REQUESTS_AHEAD - self._asked
        self._replies.send_packed(self._asking * more, [self._received] * more)
        self._asked = REQUESTS_AHEAD

    def _received(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            self._lost.set()
            return
        self._asked -= 1
        for data in reply[1]:
            self.received_bytes += len(data)
            try:
                self._on_reply(data)
            except Exception:
                log.exception("a reply could not be used")
        # Only now: this write shall not stand between a reply and its caller.
        if self._asked <= REQUESTS_AHEAD // 2 and self._replies is not None and self._replies.connected:
            self._listen()
