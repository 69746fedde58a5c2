"""Loop that answers requests whose deadline passed, and ticks the lanes that wait for an instant.

every TICK_S ─> batches in flight past a deadline: recovery.expire; whose callers have gone: recovery.leave
             ─> lanes in `timed`: Lane.tick ─> count_traffic
It sleeps while there is neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from millstream.gateway.scheduling.lane_table import LaneTable

log = logging.getLogger("millstream.expirer")

TICK_S = 0.02  # bounds how late a request gets the answer that its deadline passed
IDLE_S = 1.0  # between two ticks while nothing is in flight or waits for an instant: for the metrics of traffic
LEFT_S = 0.25  # in flight, after which it is checked whether callers of a batch are left; shorter runs are left to end


class Expirer:
    """The expirer of one gateway. Await `run` in the gateway's event loop.

    Args:
        lanes: of the gateway.
        count_traffic: called once per tick.
    """

    def __init__(self, lanes: LaneTable, count_traffic: Callable[[], None]) -> None:
        self._lanes = lanes
        self._count_traffic = count_traffic

    async def run(self) -> None:
        """Tick until cancelled."""
        lanes = self._lanes
        while True:
            if not (lanes.pending or lanes.timed):
                lanes.busy.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await lanes.busy.wait()
            await asyncio.sleep(TICK_S)
            try:
                self._tick(time.monotonic())
            except Exception:
                log.exception("a tick failed")

    def _tick(self, now: float) -> None:
        lanes = self._lanes
        for batch in list(lanes.pending.values()):
            if batch.earliest <= now:
                lanes.of(batch.lane).recovery.expire(batch, now)
            if not batch.left and batch.put_at <= now - LEFT_S:
                lanes.of(batch.lane).recovery.leave(batch, now)
        for state in list(lanes.timed):
            lanes.of(state).tick(now)
        self._count_traffic()
