"""Refuses, for some time, versions that repeatedly end their workers. All gateways count together, in Redis.

a worker's death, an endless run ─> count ─> Redis ─(four times per lease, in every gateway)─> refresh ─> Lane.block
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.scripts import script

log = logging.getLogger("millstream.circuit_breaker")


class CircuitBreaker:
    """The circuit breaker of one gateway.

    Args:
        link: returns the link to a pool; None while there is no link.
        lanes: of the gateway.
        registry: counts the events of each version.
    """

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
