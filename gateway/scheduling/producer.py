"""The batches in flight of this gateway, and its connections to the pools' Redis servers.

reply ─> its batch, by name ─> completion.resolve, once      Redis is back ─> all batches in flight are put again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from millstream.gateway.scheduling.direct_dispatch import DirectDispatch
from millstream.gateway.scheduling.lane_state import InFlightBatch
from millstream.gateway.scheduling.lane_table import TICK_S, LaneTable, run_expirer
from millstream.gateway.scheduling.reclaimer import CircuitBreaker, Reclaimer
from millstream.gateway.scheduling.streams import StreamTable
from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.reply_listener import ReplySocket
from millstream.services.queue.reply_port import ReplyPort
from millstream.services.queue.url import RedisAddress
from millstream.services.wire.batch import ReplyHeader, Unreadable, decode_reply

log = logging.getLogger("millstream.producer")

NOT_READ = "no worker of this version can read what this gateway sends: restart the workers with its release"


class ReplyWays(NamedTuple):
    """The ways by which replies reach a gateway without a trip through Redis."""

    #: folder of the reply socket, by which workers on this host send replies; None: there is none
    sockets: Path | None = None
    #: whether batches are dispatched to idle workers on this host directly
    direct: bool = True
    #: port on which workers on other hosts send replies, 0: any free port; None: there is none
    port: int | None = None


class Producer:
    """Puts batches and receives replies for all `lanes` of one gateway."""

    def __init__(
        self,
        address: RedisAddress,
        keys: InstallationKeys,
        gateway: str,
        lanes: LaneTable,
        registry: MetricsRegistry,
        lease_s: float,
        ways: ReplyWays = ReplyWays(),  # noqa: B008 - immutable
    ) -> None:
        self.lanes = lanes
        self._address = address
        self._keys = keys
        self._gateway = gateway
        self._links: dict[str, ProducerLink] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.circuit_breaker = CircuitBreaker(self._links.get, lanes, registry)
        self.direct: DirectDispatch | None = None
        self._socket: ReplySocket | None = None
        if ways.sockets is not None:
            if ways.direct:
                self.direct = DirectDispatch(registry, lanes, self._known_workers)
            self._socket = ReplySocket(ways.sockets, keys, gateway, self._on_socket_reply, self.direct)
        self._port = None if ways.port is None else ReplyPort(ways.port, self._on_remote_reply)
        for listener in (self._socket, self._port):
            if listener is not None:
                listener.streams = StreamTable(lanes)
        self.reclaimer = Reclaimer(self._links, self.circuit_breaker, registry, lease_s, lanes.pending, self.direct)
        self._duplicates = registry.counter(catalogue.DUPLICATE_REPLIES)
        self._logins_refused = registry.counter(catalogue.REPLY_LOGINS_REFUSED)
        self._reconnects = registry.counter(catalogue.REDIS_RECONNECTS, registry.process)
        self._sent = registry.counter(catalogue.REDIS_BYTES, "gateway_out")
        self._received = registry.counter(catalogue.REDIS_BYTES, "gateway_in")

    async def link(self, pool: str) -> ProducerLink:
        """Return the connection to a pool. Raises OSError, Failure, or Redis' error on the first connection."""
        link = self._links.get(pool)
        if link is None:
            link = ProducerLink(
                self._address,
                self._keys.pool(pool),
                self._gateway,
                self._on_reply,
                lambda lost: self._restored(pool, lost),
                self._put_done,
            )
            self._links[pool] = link
            try:
                await link.start()
            except BaseException:
                del self._links[pool]
                raise
            if self._port is not None:
                link.reply_port = self._port
                with suppress(Failure):  # not connected any longer: each refresh announces it again
                    await link.announce_reply_address()
        return link

    def connected(self) -> bool:
        """Whether the Redis of every pool takes batches."""
        return all(link.writable for link in self._links.values())

    def start(self) -> None:
        if self._socket is not None:
            self._socket.start()
        expirer = run_expirer(self.lanes, self._count_traffic)
        self._loops = [asyncio.create_task(expirer), asyncio.create_task(self.reclaimer.run())]

    async def stop(self) -> None:
        for task in (*self._loops, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)
        await self.circuit_breaker.stop()
        if self.direct is not None:
            await self.direct.stop()
        for link in self._links.values():
            await link.stop()
        for listener in (self._socket, self._port):
            if listener is not None:
                listener.stop()

    async def settle(self) -> None:
        """Wait until every lane is idle: then each admitted request is answered. Deadlines bound the wait."""
        while not all(lane.idle for lane in self.lanes.all()):
            await asyncio.sleep(TICK_S)

    def _on_reply(self, data: bytes) -> None:
        decoded = decode_reply(data)
        if isinstance(decoded, str):
            batch = self.lanes.pending.get(decoded)
            if batch is None:
                return
            if isinstance(decoded, Unreadable):
                self.lanes.of(batch.lane).recovery.put_again(batch, NOT_READ)
            else:
                self.lanes.of(batch.lane).recovery.give_up(batch)
            return
        self._answer(*decoded)

    def _on_socket_reply(self, data: bytes) -> None:
        """Take a reply that a worker on this host sent to this gateway's socket. Raises ValueError.

        Only a whole reply comes this way. To a batch from the queue: Redis has not checked the lease of the worker, so
        shared memory of the batch, in which another worker may still write, must not be free after it. A batch that was
        dispatched directly has had this worker only.
        """
        decoded = decode_reply(data)
        batch = self.lanes.pending.get(decoded if isinstance(decoded, str) else decoded[0].name)
        if batch is not None and batch.direct is not None:
            if isinstance(decoded, str):
                self.lanes.of(batch.lane).recovery.give_up(batch)
            else:
                self._answer_whole(*decoded)
            return
        self._answer_queued(decoded, batch)

    def _on_remote_reply(self, pool: str, data: bytes) -> None:
        """Take a reply that a worker of a pool on another host sent. Raises ValueError, as `_on_socket_reply` does."""
        decoded = decode_reply(data)
        batch = self.lanes.pending.get(decoded if isinstance(decoded, str) else decoded[0].name)
        if batch is not None and (batch.lane.link.keys.pool != pool or batch.direct is not None):
            raise ValueError("the reply of a worker that cannot have the batch")
        self._answer_queued(decoded, batch)

    def _answer_queued(self, decoded: str | tuple[ReplyHeader, memoryview], batch: InFlightBatch | None) -> None:
        """Answer a batch from the queue with a reply that took no queue. Raises ValueError unless it is a whole one."""
        if isinstance(decoded, str) or (batch is not None and batch.slices):
            raise ValueError("not a whole reply, which only comes through Redis")
        self._answer_whole(*decoded)

    def _answer_whole(self, header: ReplyHeader, inline: memoryview) -> None:
        if header.blob:
            raise ValueError("not a whole reply, which only comes through Redis")
        self._answer(header, inline)

    async def _known_workers(self, pool: str, workers: Collection[str], within_s: float) -> set[str]:
        """Return those of some workers that Redis had a heartbeat of within some seconds; all if it does not answer."""
        link = self._links.get(pool)
        try:
            if link is None:
                return set(workers)
            scores = await link.call("ZMSCORE", link.keys.workers, *workers)
        except Exception:  # not reachable: leases do not expire meanwhile either
            return set(workers)
        since_ms = link.clock.now_ms() - within_s * 1000
        beats = zip(workers, scores, strict=True)
        return {worker for worker, beat_ms in beats if beat_ms is not None and float(beat_ms) >= since_ms}

    def _answer(self, header: ReplyHeader, inline: memoryview) -> None:
        batch = self.lanes.pending.get(header.name)
        if batch is None:
            self._duplicates.add()
        elif header.blob:
            task = asyncio.create_task(self._fetch_blob(batch, header))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self.lanes.of(batch.lane).completion.resolve(batch, header, inline)

    async def _fetch_blob(self, batch: InFlightBatch, header: ReplyHeader) -> None:
        link = batch.lane.link
        try:
            blob = await link.take_blob(header.blob)
        except Failure:
            return  # not connected: after the reconnect `_restored` puts the batch again
        except Exception as error:
            blob = b""
            log.warning("outputs of batch %s could not be fetched: %s", header.name, error)
        if self.lanes.pending.get(header.name) is not batch:
            self._duplicates.add()
        elif not blob:
            self.lanes.of(batch.lane).recovery.put_again(batch)
        else:
            link.received_bytes += len(blob)
            self.lanes.of(batch.lane).completion.resolve(batch, header, memoryview(blob))

    def _restored(self, pool: str, lost: bool) -> None:
        """Put all batches in flight to a pool again after a reconnect. A batch that runs twice is answered once.

        Also if Redis kept its data (`lost` is False): a batch or a reply may have been lost with the connection.
        """
        log.info("pool %s: connected; Redis %s", pool, "lost its data" if lost else "kept its data")
        for batch in list(self.lanes.pending.values()):
            # A stream that has begun comes over a connection of its own: it goes on.
            if batch.lane.link is self._links.get(pool) and batch.direct is None and not batch.requests[0].begun:
                self.lanes.of(batch.lane).recovery.put_again(batch)
        for lane in self.lanes.all():
            lane.dispatcher.dispatch()

    def _put_done(self, name: str, reply: Any) -> None:
        """Handle the reply to a put: an Exception if Redis refused, a Failure if the connection broke (`_restored`)."""
        batch = self.lanes.pending.get(name)
        if batch is None or isinstance(reply, Failure):
            return
        if not isinstance(reply, Exception):
            return
        if "NOSCRIPT" in str(reply):
            task = asyncio.create_task(self._load_and_put(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            batch.lane.link.drop_blob(name)
            self.lanes.of(batch.lane).recovery.refuse(batch, str(reply))

    async def _load_and_put(self, batch: InFlightBatch) -> None:
        try:
            await batch.lane.link.load_scripts()
        except Exception as error:
            log.warning("the scripts could not be loaded: %s", error)
        if self.lanes.pending.get(batch.name) is batch:
            self.lanes.of(batch.lane).recovery.put_again(batch)

    def _count_traffic(self) -> None:
        """Add what the links and the reply port counted since the last call to the metrics."""
        for link in self._links.values():
            self._sent.add(link.sent_bytes)
            self._received.add(link.received_bytes)
            self._reconnects.add(link.reconnects)
            link.sent_bytes = link.received_bytes = link.reconnects = 0
        if self._port is not None:
            self._logins_refused.add(self._port.refused)
            self._port.refused = 0
