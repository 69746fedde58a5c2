"""reporter: loop that publishes what this gateway counted, and reads the decisions of the controller.

LoadBook ─> loads in Redis          decisions in Redis ─> asleep pools, start times
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from millstream.gateway.parts import GatewayParts
from millstream.gateway.scheduling.lane import Lane
from millstream.plugins.fleet.gateway.load_book import LoadBook
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.plugins.fleet.scaling import PoolLoad, ScaleDecision, is_fresh
from millstream.services.errors import Failure
from millstream.services.process.cancel import cancel_all
from millstream.services.queue.limited_client import FAREWELL_S_MAX, without_redis_after

log = logging.getLogger("millstream.scaling")

EVERY_S = 0.5  # between two reports: a request wakes a pool without workers within this time and a decision
REPEAT_S = 2.0  # between two that say the same: half of the life of a report is left for one that is lost


class LoadReporter:
    """Reports for one gateway, from `start` until `stop`."""

    def __init__(self, parts: GatewayParts) -> None:
        self._gateway = parts.unique_name
        self._scale_state = ScaleState(parts.address, parts.keys)
        self._lanes = parts.lanes
        self._scale = parts.scale
        self._book = LoadBook()
        self._reported: Mapping[str, PoolLoad] = {}
        self._repeat_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._run(), name="load reporter"))

    async def decisions(self) -> tuple[Mapping[str, ScaleDecision], float]:
        """Return the last decisions about the size of each pool, and the time of the Redis clock. Raises Failure."""
        return await self._scale_state.decisions()

    async def _run(self) -> None:
        while True:
            try:
                await self._report(time.monotonic())
            except Failure as failure:
                log.debug("no load was reported: %s", failure.message)
                self._scale.set({}, frozenset())
                self._repeat_at = 0.0
            except Exception:
                log.exception("no load was reported; trying again")
            await asyncio.sleep(EVERY_S)

    async def _report(self, now: float) -> None:
        """Publish the counters once, and read the decisions. Raises Failure."""
        used = self._lanes.take_used()
        running: dict[Lane, int] = {}
        for batch in self._lanes.pending.values():
            rows = sum([request.rows for request in batch.requests if request.counted and not request.done])
            if rows:
                lane = self._lanes.of(batch.lane)
                running[lane] = running.get(lane, 0) + rows
        loads = self._book.count(used, running, now)
        if loads.pools == self._reported and now < self._repeat_at:
            return
        decisions, redis_now = await self._scale_state.exchange(self._gateway, loads)
        self._reported, self._repeat_at = loads.pools, now + REPEAT_S
        fresh = {pool: one for pool, one in decisions.items() if is_fresh(one, redis_now)}
        scaled = {pool: one for pool, one in fresh.items() if one.workers_max}
        self._scale.set(
            {pool: one.start_s for pool, one in scaled.items()},
            frozenset(pool for pool, one in scaled.items() if not one.workers_min),
        )

    async def stop(self) -> None:
        """Report no more, and remove what was published."""
        await cancel_all(self._tasks)
        async with without_redis_after(FAREWELL_S_MAX):
            await self._scale_state.remove_loads(self._gateway)
        await self._scale_state.close()


def build(parts: GatewayParts) -> LoadReporter:
    """Return the fleet's part of a gateway."""
    return LoadReporter(parts)
