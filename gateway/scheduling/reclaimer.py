"""What a gateway does about workers that die: takes back their leases, and refuses versions that repeatedly end them.

every quarter of a lease, for each pool ─> link.refresh (a Redis that lost its data?) ─> reclaim ─> refresh of refusals
a supervisor announces a worker's death ─> reclaim, at once
a worker's death, an endless run ─> count ─> Redis, for all gateways together ─(refresh)─> Lane.block
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from millstream.gateway.scheduling.direct_dispatch import DirectDispatch
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.waits import next_tick
from millstream.services.queue.death_notices import Death
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.scripts import ATTEMPTS_MAX, script, script_call

log = logging.getLogger("millstream.reclaimer")


class CircuitBreaker:
    """Refuses, for some time, versions that repeatedly end their workers. All gateways count together, in Redis."""

    def __init__(self, link: Callable[[str], ProducerLink | None], lanes: LaneTable, registry: MetricsRegistry) -> None:
        self._link = link
        self._lanes = lanes
        self._registry = registry
        self._tasks: set[asyncio.Task[None]] = set()

    def count_soon(self, pool: str, content_id: str, event: str) -> None:
        """Run `count` in a task of its own."""
        task = asyncio.create_task(self.count(pool, content_id, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def count(self, pool: str, content_id: str, event: str) -> None:
        """Count an event against a version. `event` names it, so that it counts once for all gateways."""
        counted = await self._call_blame(pool, content_id, event)
        lane = next((lane for lane in self._lanes.all() if lane.content_id == content_id), None)
        if counted and lane is not None:
            manifest = lane.manifest
            self._registry.counter(catalogue.WORKER_DEATHS, manifest.model, str(manifest.version), pool).add()

    async def refresh(self, pool: str) -> None:
        """Block the lanes of the versions of a pool that are refused now."""
        await self._call_blame(pool, "", "")

    async def _call_blame(self, pool: str, content_id: str, event: str) -> bool:
        """Call the blame script, and block the lanes of refused versions. Returns whether the event was counted."""
        link = self._link(pool)
        if link is None or not link.writable:
            return False
        try:
            keys = link.keys
            reply: Any = await link.call(
                "EVALSHA", script("blame").sha, 2, keys.blamed, keys.counted(event), content_id
            )
        except Failure:
            return False
        except Exception as error:
            log.warning("asking which versions of pool %s are refused failed: %s", pool, error)
            return False
        counted, *refused = reply
        if refused:
            blocks = {name.decode(): (deaths, ms / 1000) for name, deaths, ms in refused}
            for lane in self._lanes.all():
                if lane.pool == pool and lane.content_id in blocks:
                    lane.block(*blocks[lane.content_id])
        return bool(counted)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Reclaimer:
    """The reclaimer of one gateway. Await `run` in the gateway's event loop.

    Args:
        links: the gateway's connections, by pool.
        lease_s: seconds without a heartbeat after which a worker loses its leases.
        in_flight: the batches of this gateway that are in flight.
    """

    def __init__(
        self,
        links: Mapping[str, ProducerLink],
        circuit_breaker: CircuitBreaker,
        registry: MetricsRegistry,
        lease_s: float,
        in_flight: Collection[object],
        direct: DirectDispatch | None = None,
    ) -> None:
        self._direct = direct
        self._links = links
        self._circuit_breaker = circuit_breaker
        self._registry = registry
        self._lease_s = lease_s
        self._in_flight = in_flight

    async def run(self) -> None:
        """Reclaim four times per lease while batches are in flight, else once, until cancelled.

        A pool whose Redis does not answer delays no other.
        """
        looks: dict[str, asyncio.Task[None]] = {}
        look = 0
        try:
            while True:
                await next_tick(self._lease_s / 4)
                look += 1
                if look % 4 and not self._in_flight:
                    continue
                for pool, link in self._links.items():
                    if pool not in looks or looks[pool].done():
                        looks[pool] = asyncio.create_task(self._look(pool, link))
        finally:
            await cancel_all(looks.values())

    async def _look(self, pool: str, link: ProducerLink) -> None:
        try:
            await link.refresh()
        except Failure:
            return  # not connected: the link reconnects by itself
        except Exception as error:
            log.warning("pool %s: its Redis could not be checked: %s", pool, error)
        try:
            await self.reclaim(pool)
            if self._direct is not None:
                await self._direct.check(pool, self._lease_s)
            await self._circuit_breaker.refresh(pool)
        except Exception:
            log.exception("pool %s: its batches could not be looked after", pool)

    async def reclaim(self, pool: str, death: Death | None = None) -> None:
        """Take back the leases of a pool's silent workers, or those of the worker whose `death` was announced."""
        if death is not None and self._direct is not None:
            self._direct.died(death)
        link = self._links.get(pool)
        if link is None or not link.writable:
            return
        try:
            dead_worker = _arguments(death) if death is not None else ("", 0)
            lease_ms = round(self._lease_s * 1000)
            reply: Any = await link.call(*script_call("reclaim", link.keys, (), lease_ms, ATTEMPTS_MAX, *dead_worker))
        except Failure:
            return
        except Exception as error:
            log.warning("pool %s: reclaiming failed: %s", pool, error)
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
            self._registry.counter(catalogue.BATCHES_RECLAIMED, pool).add(again + dead)


def _arguments(death: Death) -> tuple[str | int, ...]:
    """Return the reclaim script's arguments for a death."""
    if death.batches is None:
        return death.worker, 1
    return death.worker, 1, 1, *death.batches
