"""producer: outstanding batches of this gateway and its links to the pools. A reply comes in, its lane resolves it once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from millstream.gateway.scheduling.circuit_breaker import CircuitBreaker
from millstream.gateway.scheduling.in_flight import InFlightBatch
from millstream.gateway.scheduling.lane import Lane
from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue.death_notices import Death
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.scripts import ATTEMPTS_MAX, script_call
from millstream.services.queue.url import RedisAddress
from millstream.services.wire.batch import ReplyHeader, Unreadable, decode_reply

log = logging.getLogger("millstream.producer")

NOT_READ = "no worker of this version can read what this gateway sends: restart the workers with its release"
TICK_S = 0.02


class Producer:
    """`lanes` gives all lanes, for the agents that look after them."""

    def __init__(
        self, address: RedisAddress, keys: InstallationKeys, gateway: str, registry: MetricsRegistry, lease_s: float
    ) -> None:
        self.pending: dict[str, InFlightBatch] = {}
        self.lanes: Callable[[], list[Lane]] = list
        self.ticking: set[Lane] = set()  # those that `Lane.tick` has something to do for
        self._address = address
        self._keys = keys
        self._gateway = gateway
        self._lease_s = lease_s
        self._links: dict[str, ProducerLink] = {}
        self._agents: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._registry = registry
        self.circuit_breaker = CircuitBreaker(self._links.get, lambda: self.lanes(), registry)  # noqa: PLW0108 - others set it later
        self._duplicates = registry.counter(catalogue.DUPLICATE_REPLIES)
        self._reconnects = registry.counter(catalogue.REDIS_RECONNECTS)
        self._sent = registry.counter(catalogue.REDIS_BYTES, "gateway_out")
        self._received = registry.counter(catalogue.REDIS_BYTES, "gateway_in")

    async def link(self, pool: str) -> ProducerLink:
        """The link to a pool, connected. Raises OSError, Failure or what Redis answers to a first connection."""
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
        return link

    def connected(self) -> bool:
        return all(link.writable for link in self._links.values())

    def start(self) -> None:
        self._agents = [asyncio.create_task(self._tick()), asyncio.create_task(self._reclaim())]

    async def stop(self) -> None:
        for task in (*self._agents, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._agents, *self._tasks, return_exceptions=True)
        await self.circuit_breaker.stop()
        for link in self._links.values():
            await link.stop()

    async def settle(self) -> None:
        """Wait until every lane is idle: all that was accepted is answered (deadlines bound this)."""
        while not all(lane.idle for lane in self.lanes()):
            await asyncio.sleep(TICK_S)

    def _on_reply(self, data: bytes) -> None:
        decoded = decode_reply(data)
        if isinstance(decoded, str):
            batch = self.pending.get(decoded)
            if batch is None:
                return
            if isinstance(decoded, Unreadable):
                batch.lane.recovery.put_again(batch, NOT_READ)
            else:
                batch.lane.recovery.give_up(batch)
            return
        header, inline = decoded
        batch = self.pending.get(header.name)
        if batch is None:
            self._duplicates.add()
        elif header.blob:
            task = asyncio.create_task(self._fetch_blob(batch, header))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            batch.lane.completion.resolve(batch, header, inline)

    async def _fetch_blob(self, batch: InFlightBatch, header: ReplyHeader) -> None:
        link = batch.lane.link
        try:
            blob = await link.take_blob(header.blob)
        except Failure:
            return  # away: when Redis is back, `_restored` puts the batch again
        except Exception as error:
            blob = b""
            log.warning("outputs of batch %s could not be fetched: %s", header.name, error)
        if self.pending.get(header.name) is not batch:
            self._duplicates.add()
        elif not blob:
            batch.lane.recovery.put_again(batch)
        else:
            link.received_bytes += len(blob)
            batch.lane.completion.resolve(batch, header, memoryview(blob))

    def _restored(self, pool: str, lost: bool) -> None:
        """Redis is back: all that is outstanding is put again. A batch that runs twice answers once.

        Also when Redis kept its data: the batch may not have reached it, or a reply may have been on the connection.
        """
        log.info("pool %s: connected; Redis %s", pool, "lost what it had" if lost else "has what it had")
        for batch in list(self.pending.values()):
            if batch.lane.link is self._links.get(pool):
                batch.lane.recovery.put_again(batch)
        for lane in self.lanes():
            lane.dispatch()

    def _put_done(self, name: str, reply: Any) -> None:
        """Redis answered a put, or the connection was lost before it could (then `_restored` decides)."""
        batch = self.pending.get(name)
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
            batch.lane.recovery.refuse(batch, str(reply))

    async def _load_and_put(self, batch: InFlightBatch) -> None:
        try:
            await batch.lane.link.load_scripts()
        except Exception as error:
            log.warning("the scripts could not be loaded: %s", error)
        if self.pending.get(batch.name) is batch:
            batch.lane.recovery.put_again(batch)

    async def _tick(self) -> None:
        """expirer: deadlines of what waits and of what is batch."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            try:
                for batch in list(self.pending.values()):
                    if batch.earliest <= now:
                        batch.lane.recovery.expire(batch, now)
                for lane in list(self.ticking):
                    lane.tick(now)
                self._count()
            except Exception:
                log.exception("looking after the lanes failed")

    def _count(self) -> None:
        for link in self._links.values():
            self._sent.add(link.sent_bytes)
            self._received.add(link.received_bytes)
            self._reconnects.add(link.reconnects)
            link.sent_bytes = link.received_bytes = link.reconnects = 0

    async def _reclaim(self) -> None:
        """reclaimer: brings back what silent workers had leased, and what Redis lost."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            for pool, link in list(self._links.items()):
                try:
                    await link.refresh()
                except Failure:
                    continue  # away: the link itself sees to that
                except Exception as error:
                    log.warning("looking after the queue of pool %s failed: %s", pool, error)
                await self.reclaim(pool)
                await self.circuit_breaker.look(pool)

    async def reclaim(self, pool: str, death: Death | None = None) -> None:
        """Take back the leases of silent workers of a pool, or of one that died."""
        link = self._links.get(pool)
        if link is None or not link.writable:
            return
        try:
            of_whom = _reclaimed(death) if death is not None else ("", 0)
            lease_ms = round(self._lease_s * 1000)
            reply: Any = await link.call(*script_call("reclaim", link.keys, (), lease_ms, ATTEMPTS_MAX, *of_whom))
        except Failure:
            return
        except Exception as error:
            log.warning("reclaiming in pool %s failed: %s", pool, error)
            return
        workers, again, dead = reply
        if workers:
            log.warning(
                "pool %s: %d workers are gone; %d batches put again, %d to be tried alone or given up",
                pool,
                workers,
                again,
                dead,
            )
            self._registry.counter(catalogue.RECLAIMED, pool).add(again + dead)


def _reclaimed(death: Death) -> tuple[str | int, ...]:
    """What the script is told of a death."""
    if death.batches is None:
        return death.worker, 1
    return death.worker, 1, 1, *death.batches
