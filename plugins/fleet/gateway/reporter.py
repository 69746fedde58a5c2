"""reporter: loop that publishes what this gateway counted, and reads the decisions of the controller.

LoadBook ─> loads in Redis          decisions in Redis ─> asleep pools, start times
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping

from millstream.gateway.catalog.interfaces import ScaleView
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.plugins.fleet.gateway.load_book import LoadBook
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.plugins.fleet.scaling import ScaleDecision, is_fresh
from millstream.services.errors import Failure
from millstream.services.queue.limited_client import FAREWELL_S_MAX, without_redis_after

log = logging.getLogger("millstream.scaling")

EVERY_S = 0.5  # between two reports: a request wakes a pool without workers within this time and a decision


class LoadReporter(ScaleView):
    """Reports for one gateway. Await `run` in the gateway's event loop.

    `decisions`: the last ones that count still, by pool.

    Args:
        gateway: its name.
        scale_state: publishes and reads.
        lanes: the gateway's.
    """

    def __init__(self, gateway: str, scale_state: ScaleState, lanes: LaneTable) -> None:
        self.decisions: Mapping[str, ScaleDecision] = {}
        self._gateway = gateway
        self._scale_state = scale_state
        self._lanes = lanes
        self._book = LoadBook()

    def asleep(self, staffed: Collection[str]) -> frozenset[str]:
        elastic = (pool for pool, one in self.decisions.items() if one.workers_min == 0 < one.workers_max)
        return frozenset(pool for pool in elastic if pool not in staffed)

    def start_s(self, pool: str) -> float:
        decision = self.decisions.get(pool)
        return 0.0 if decision is None or not decision.workers_max else decision.start_s

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            try:
                await self.report()
            except Failure as failure:
                log.debug("no load was reported: %s", failure.message)
                self.decisions = {}
            except Exception:
                log.exception("no load was reported; trying again")
            await asyncio.sleep(EVERY_S)

    async def report(self) -> None:
        """Publish the counters once, and read the decisions. Raises Failure."""
        used = self._lanes.take_used()
        running: dict[Lane, int] = {}
        for batch in self._lanes.pending.values():
            rows = sum([request.rows for request in batch.requests if request.counted and not request.done])
            if rows:
                lane = self._lanes.of(batch.lane)
                running[lane] = running.get(lane, 0) + rows
        loads = self._book.count(used, running, time.monotonic())
        decisions, now = await self._scale_state.exchange(self._gateway, loads)
        self.decisions = {pool: one for pool, one in decisions.items() if is_fresh(one, now)}

    async def close(self) -> None:
        """Remove what was published. Call it when `run` has ended."""
        async with without_redis_after(FAREWELL_S_MAX):
            await self._scale_state.remove_loads(self._gateway)
        await self._scale_state.close()
