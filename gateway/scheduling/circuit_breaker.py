"""circuit_breaker: versions that keep ending workers, counted in Redis by all gateways together, are refused for a while.

a death, an endless run ─> count ─> Redis ─(every half second, in every gateway)─> look ─> Lane.block
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from millstream.gateway.scheduling.lane import Lane
from millstream.services.errors import Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.queue.scripts import script

log = logging.getLogger("millstream.circuit_breaker")


class CircuitBreaker:
    """For one gateway. `link`: to a pool, None while there is none."""

    def __init__(
        self, link: Callable[[str], ProducerLink | None], lanes: Callable[[], list[Lane]], registry: MetricsRegistry
    ) -> None:
        self._link = link
        self._lanes = lanes
        self._registry = registry
        self._tasks: set[asyncio.Task[None]] = set()

    def count_soon(self, pool: str, content_id: str, about: str) -> None:
        """`count`, in a task of its own."""
        task = asyncio.create_task(self.count(pool, content_id, about))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def count(self, pool: str, content_id: str, about: str) -> None:
        """Hold something against a version. `about`: names what happened, so that it counts once for all gateways."""
        counted = await self._ask(pool, content_id, about)
        lane = next((lane for lane in self._lanes() if lane.content_id == content_id), None)
        if counted and lane is not None:
            manifest = lane.manifest
            self._registry.counter(catalogue.VERSION_DEATHS, manifest.model, str(manifest.version), pool).add()

    async def look(self, pool: str) -> None:
        """Hear which versions of a pool are refused now."""
        await self._ask(pool, "", "")

    async def _ask(self, pool: str, content_id: str, about: str) -> bool:
        link = self._link(pool)
        if link is None or not link.writable:
            return False
        try:
            keys = link.keys
            reply: Any = await link.call(
                "EVALSHA", script("blame").sha, 2, keys.blamed, keys.counted(about), content_id
            )
        except Failure:
            return False
        except Exception as error:
            log.warning("asking which versions of pool %s are refused failed: %s", pool, error)
            return False
        counted, *refused = reply
        if refused:
            left = {name.decode(): (deaths, ms / 1000) for name, deaths, ms in refused}
            for lane in self._lanes():
                if lane.content_id in left:
                    lane.block(*left[lane.content_id])
        return bool(counted)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
