"""A gateway's connections to the Redis of one pool: one that sends batches, one that blocks for replies.

It reconnects with bounded back-off and jitter until it is stopped, and reports when Redis is back and whether its data
was lost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, cast

import hiredis

from millstream.services.errors import Code, Failure
from millstream.services.process.waits import Backoff, Draw
from millstream.services.queue.blob import is_last, read_command, write_commands
from millstream.services.queue.keys import PoolKeys
from millstream.services.queue.pipeline import Pipeline, RedisClock, connect
from millstream.services.queue.reply_port import ReplyPort
from millstream.services.queue.scripts import script, script_call
from millstream.services.queue.sharing import Share
from millstream.services.queue.url import RedisAddress

log = logging.getLogger("millstream.queue")

REPLIES_AT_ONCE = 16  # replies that one BLMPOP returns at most
REQUESTS_AHEAD = 16  # BLMPOPs that are sent ahead: Redis blocks on the first, and takes the next when that is answered
REPLY_WAIT_S = 10.0  # of one BLMPOP: without replies, its answer shows that the connection lives
OLD_LISTS_S = 60.0  # how long reply lists of earlier connections are deleted again and again
OLD_LISTS_MAX = 100
BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0
BLOB_LIFE_MS = 60_000
EPOCH_LIFE_S = 86_400
REPLY_ADDRESS_LIFE_S = 60  # of the address of the reply port, which each refresh writes again
BUFFERED_BYTES_MAX = 64 << 20  # unsent bytes at which no further batch is put


class ProducerLink:
    """Sends the batches of one gateway to one pool and receives their replies.

    Args:
        gateway: unique name of the gateway.
        on_reply: called with each reply.
        on_restored: called after each connect, with True if Redis has lost everything that was put before.
        on_put: called with a batch's name and Redis' reply, or with an Exception if Redis refused the batch.
        draw: random numbers for the pauses before the link reconnects.
    """

    def __init__(
        self,
        address: RedisAddress,
        keys: PoolKeys,
        gateway: str,
        on_reply: Callable[[bytes], None],
        on_restored: Callable[[bool], None],
        on_put: Callable[[str, Any], None],
        draw: Draw = random.random,
    ) -> None:
        self.keys = keys
        self.clock = RedisClock()
        self.replies_key = self.keys.replies(gateway)  # of this connection
        self.sent_bytes = 0
        self.received_bytes = 0
        self.reconnects = 0
        self.reply_port: ReplyPort | None = None  # whose address the pool's workers are told
        self._announced = True  # whether Redis took the address of the reply port last time
        self._gateway = gateway
        self._names = f"{gateway}-{keys.pool}-"  # the links of a gateway to several pools share its batches by name
        self._numbers = itertools.count(1)
        self._address = address
        self._on_reply = on_reply
        self._on_restored = on_restored
        self._on_put = on_put
        self._draw = draw
        self._connections = 0  # so far
        #: reply lists of earlier connections, and when to stop deleting them (monotonic)
        self._old_lists: deque[tuple[bytes, float]] = deque(maxlen=OLD_LISTS_MAX)
        self._put_head = (b"EVALSHA", script("put").sha, len(keys.scheduling) + 1, *keys.scheduling)
        self._pop_replies = b""  # the packed BLMPOP
        self._pops_unanswered = 0
        self._answered = 0.0  # when a BLMPOP was last answered (monotonic)
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
        """Whether a batch may be put now: connected, and less than BUFFERED_BYTES_MAX is unsent."""
        out = self._out
        return out is not None and out.connected and out.buffered_bytes < BUFFERED_BYTES_MAX

    def new_name(self) -> str:
        """Return a name for a batch that is unique among all gateways."""
        return f"{self._names}{next(self._numbers):x}"

    async def start(self) -> None:
        """Connect. Raises what the first attempt raises; lost connections are restored in the background."""
        # In contexts of their own: what is logged about the connection is not about the request that opened it.
        await asyncio.create_task(self._connect(), context=Context())
        self._task = asyncio.create_task(self._reconnect(), context=Context())

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
        share: Share,
    ) -> None:
        """Append a batch to its lane's stream. Raises Failure(UNAVAILABLE) without a connection.

        Args:
            lane: the version's lane.
            name: unique name of the batch.
            entry: the encoded batch.
            blob: tensors that go to a blob key of their own, or b"".
            deadline_ms: on the Redis clock.
            attempt: number of the attempt, from 1 on.
            share: what the batch takes of the pool's workers.
        """
        out, keys = self._out, self.keys
        if out is None:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable", retry_after_s=1)
        on_put = partial(self._on_put, name)
        if blob:
            # One refused part ends this batch, whatever Redis answers to the other commands.
            for command in write_commands(keys.blob(name), blob, BLOB_LIFE_MS):
                self.sent_bytes += out.send(command, on_put)
        self.sent_bytes += out.send(
            (
                *self._put_head, keys.stream(lane), keys.prefix, lane,
                entry, attempt, b"%d" % deadline_ms, self.replies_key, name,
                b"%.3f" % share.cost_ms, b"%.3f" % share.fill, int(share.call), share.long_ms,
            ),
            on_put,
        )  # fmt: skip

    def drop_blob(self, name: str) -> None:
        """Delete the tensors of a batch that Redis refused, without waiting; after a lost connection they expire."""
        self._tell((b"DEL", self.keys.blob(name)))

    def leave(self, name: str, life_s: float) -> None:
        """Tell the worker that runs a batch that all its callers have gone. `life_s`: until its last deadline."""
        self._tell((b"SET", self.keys.left(name), b"1", b"PX", max(1, int(life_s * 1000))))

    def drop_left(self, name: str) -> None:
        """Delete what `leave` told: the batch is no longer in flight. After a lost connection it expires."""
        self._tell((b"DEL", self.keys.left(name)))

    def withdraw(self, lane: str, name: str, *, refused: bool = False) -> None:
        """Remove a batch whose requests are gone if no worker serves its lane; else it would stay there for an hour.

        `refused`: its version is refused. It is returned if no worker has it, whoever serves the lane.
        """
        keys = self.keys
        self._tell(script_call("withdraw", keys, (keys.stream(lane),), lane, name, int(refused)))

    def _tell(self, command: tuple[bytes | str | int, ...]) -> None:
        """Send a command without waiting, if there is a connection."""
        if self._out is not None and self._out.connected:
            self._out.send(command)

    async def take_blob(self, name: str) -> bytes:
        """Read a blob, part by part, and delete it; returns b"" if it is not there. Raises as `call` does."""
        key = self.keys.blob(name)
        parts: list[bytes] = []
        last = False
        while not last:
            more: list[bytes] = await self.call(*read_command(key, len(parts)))
            parts += more
            last = not more or is_last(more)
        self._tell((b"DEL", key))  # if the connection is lost, the key expires
        return b"".join(parts)

    async def call(self, *words: bytes | str | int) -> Any:
        """Send a command on the connection of batches and return its reply.

        Raises Failure(UNAVAILABLE) or the error that Redis answers. Without a reply in time the connection counts as
        lost: a server that vanished does not close its connections.
        """
        if self._out is None:
            raise Failure(Code.UNAVAILABLE, "Redis is not reachable", retry_after_s=1)
        try:
            async with asyncio.timeout(self._address.reply_s_max):
                return await self._out.call(*words)
        except TimeoutError as error:
            self._lost.set()
            raise Failure(Code.UNAVAILABLE, "Redis does not answer", retry_after_s=1) from error

    async def demand(self, lane: str, life_ms: int, order: bytes, workers: list[str]) -> tuple[str, bool]:
        """Order a worker to load a version, unless all gateways together ordered one before.

        Args:
            lane: the version's lane.
            life_ms: how long no other worker is ordered.
            order: a wire.orders.Order as JSON.
            workers: who may load it, the best first.

        Returns the worker that is ordered ("": a worker serves the lane, or none of `workers` is alive), and whether
        it was ordered now. Raises as `call` does.
        """
        command = script_call("demand", self.keys, (self.keys.demands,), lane, life_ms, order, *workers)
        try:
            reply = await self.call(*command)
        except hiredis.ReplyError as error:
            if "NOSCRIPT" not in str(error):
                raise
            await self.load_scripts()  # Redis was restarted, or its scripts were flushed
            reply = await self.call(*command)
        return reply[0].decode(), bool(reply[1])

    async def load_scripts(self) -> None:
        """Load the scripts into Redis."""
        for name in ("put", "reclaim", "blame", "withdraw", "demand"):
            await self.call("SCRIPT", "LOAD", script(name).text)

    async def _connect(self) -> None:
        out = await connect(self._address, self._lost.set)
        try:
            replies = await connect(self._address, self._lost.set)
        except BaseException:
            out.close()
            raise
        self._lost.clear()
        self._out, self._replies, self._answered = out, replies, time.monotonic()
        await self.load_scripts()
        await self._measure_clock()
        lost = await self._check_epoch()
        self._start_reply_list()
        self._request_replies()
        self._on_restored(lost)

    async def refresh(self) -> None:
        """Measure the clock; detect a silent connection, and a Redis that lost its data without losing it (FLUSHALL).

        Also deletes reply lists of earlier connections: their batches were put again, but workers may still answer
        them. To be called regularly. Raises as `call` does.
        """
        if self._old_lists:
            await self.call("DEL", *(key for key, _ in self._old_lists))
            while self._old_lists and self._old_lists[0][1] <= time.monotonic():
                self._old_lists.popleft()
        await self._measure_clock()
        # After that call: what came meanwhile, while this process was stopped, has been read.
        if time.monotonic() > self._answered + REPLY_WAIT_S + self._address.reply_s_max:
            self._lost.set()
            raise Failure(Code.UNAVAILABLE, "the connection for replies is silent", retry_after_s=1)
        if await self._check_epoch():
            log.warning("Redis at %s lost its data", self._address)
            self._on_restored(True)
        await self.announce_reply_address()  # last: the gateway can do without

    async def announce_reply_address(self) -> None:
        """Open the reply port, if it is to be, and tell the pool's workers its address. Raises Failure(UNAVAILABLE).

        If Redis refuses the key, because it is out of memory, replies of other hosts come through the reply list.
        """
        host = None if self._out is None else self._out.local_host
        if self.reply_port is None or host is None or not self.reply_port.listen(host):
            return
        key, address = self.keys.reply_address(self._gateway), self.reply_port.address(self.keys.pool).encode()
        try:
            await self.call("SET", key, address, "EX", REPLY_ADDRESS_LIFE_S)
        except hiredis.HiredisError as error:
            if self._announced:
                log.warning("pool %s: the address of the reply port was refused: %s", self.keys.pool, error)
            self._announced = False
        else:
            self._announced = True

    async def _measure_clock(self) -> None:
        sent = time.monotonic()
        redis_time = await self.call("TIME")
        self.clock.record_measurement(sent, time.monotonic(), redis_time)

    async def _check_epoch(self) -> bool:
        """Return whether Redis lost everything that was put before."""
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

    async def _reconnect(self) -> None:
        backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX, alive_s_reset=BACKOFF_S_MAX, draw=self._draw)
        began = time.monotonic()
        away = False
        while True:
            await self._lost.wait()
            self._disconnect()
            # Also before the first attempt: Redis may have dropped the connections of all gateways at once.
            await asyncio.sleep(backoff.after_death(0.0 if away else time.monotonic() - began))
            try:
                await self._connect()
            except (OSError, Failure, hiredis.HiredisError) as error:
                if not away:
                    log.warning("Redis at %s is not reachable (%s); trying again", self._address, error)
                away = True
                self._lost.set()
            else:
                self.reconnects += 1
                away = False
                began = time.monotonic()
                log.warning("Redis at %s is back", self._address)

    def _start_reply_list(self) -> None:
        """Use a new reply list: Redis may still serve the last connection, if it does not know yet that it is gone."""
        if self._connections:
            self._old_lists.append((self.replies_key, time.monotonic() + OLD_LISTS_S))
        self._connections += 1
        self.replies_key = self.keys.replies(f"{self._gateway}-{self._connections}")
        pop = (b"BLMPOP", b"%g" % REPLY_WAIT_S, 1, self.replies_key, b"LEFT", b"COUNT", REPLIES_AT_ONCE)
        self._pop_replies = hiredis.pack_command(cast("Any", pop))
        self._pops_unanswered, self._answered = 0, time.monotonic()

    def _request_replies(self) -> None:
        """Send BLMPOPs until REQUESTS_AHEAD are unanswered, in one write instead of one write for each reply."""
        assert self._replies is not None
        more = REQUESTS_AHEAD - self._pops_unanswered
        self._replies.send_packed(self._pop_replies * more, [self._received] * more)
        self._pops_unanswered = REQUESTS_AHEAD

    def _received(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            self._lost.set()
            return
        self._pops_unanswered -= 1
        self._answered = time.monotonic()
        for data in reply[1] if reply is not None else ():
            self.received_bytes += len(data)
            try:
                self._on_reply(data)
            except Exception:
                log.exception("handling a reply failed")
        # After the callbacks, so that this write does not delay a reply.
        if self._pops_unanswered <= REQUESTS_AHEAD // 2 and self._replies is not None and self._replies.connected:
            self._request_replies()
