"""Loop that answers requests whose deadline passed, and ticks the lanes that wait for an instant.

every TICK_S ─> batches in flight past a deadline: recovery.expire; whose callers have gone: recovery.leave
             ─> lanes in `ticking`: Lane.tick ─> count_traffic
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from millstream.gateway.scheduling.in_flight import InFlightBatch
from millstream.gateway.scheduling.lane import Lane

log = logging.getLogger("millstream.expirer")

TICK_S = 0.02  # bounds how late a request gets the answer that its deadline passed
LEFT_S = 0.25  # in flight, after which it is checked whether callers of a batch are left; shorter runs are left to end


class Expirer:
    """The expirer of one gateway. Await `run` in the gateway's event loop.

    Args:
        pending: the gateway's batches in flight, by name.
        ticking: the lanes whose `tick` is to be called.
        count_traffic: called once per tick.
    """

    def __init__(
        self, pending: dict[str, InFlightBatch], ticking: set[Lane], count_traffic: Callable[[], None]
    ) -> None:
        self._pending = pending
        self._ticking = ticking
        self._count_traffic = count_traffic

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(time.monotonic())
            except Exception:
                log.exception("a tick failed")

    def _tick(self, now: float) -> None:
        for batch in list(self._pending.values()):
            if batch.earliest <= now:
                batch.lane.recovery.expire(batch, now)
            if not batch.left and batch.put_at <= now - LEFT_S:
                batch.lane.recovery.leave(batch, now)
        for lane in list(self._ticking):
            lane.tick(now)
        self._count_traffic()
