"""The lanes of one gateway, and the loop that ticks those with a batch in flight or that wait for an instant.

The table is made before all that use it. The router puts routes and lanes in; the producer and others find them here.

every TICK_S ─> batches in flight past a deadline: recovery.expire; whose callers have gone: recovery.leave
             ─> lanes in `timed`: Lane.tick ─> count_traffic
The loop sleeps while there is neither.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.lane_state import InFlightBatch, LaneState
from millstream.gateway.scheduling.model_route import ModelRoute

log = logging.getLogger("millstream.expirer")

TICK_S = 0.02  # bounds how late a request gets the answer that its deadline passed
IDLE_S = 1.0  # between two ticks while nothing is in flight or waits for an instant: for the metrics of traffic
LEFT_S = 0.25  # in flight, after which it is checked whether callers of a batch are left; shorter runs are left to end


class LaneTable:
    """The lanes of all versions, and of removed versions with batches in flight. Call it only in the event loop.

    `routes`: by content id. `pending`: batches in flight, by name. `timed`: lanes that wait for an instant; others cost
    the expirer nothing. `used`: lanes that got a batch or refused a request since `take_used`. `busy`: set when a batch
    or a lane is added to the first two.
    """

    def __init__(self) -> None:
        self.routes: Mapping[str, ModelRoute] = {}
        self.busy = asyncio.Event()
        self.pending: dict[str, InFlightBatch] = _Pending(self.busy)
        self.timed: set[LaneState] = _Timed(self.busy)
        self.used: set[LaneState] = set()
        self._lanes: dict[LaneState, Lane] = {}
        self._closed: list[Lane] = []
        self._answered: dict[str, float] = {}  # requests by content id that other pools than the preferred one answered

    def add(self, lane: Lane) -> None:
        self._lanes[lane.state] = lane

    def close(self, lane: Lane) -> None:
        """Forget a lane as soon as nothing of it is in flight."""
        self._closed.append(lane)

    def of(self, state: LaneState) -> Lane:
        """Return the lane of a state: of a batch in flight, or of one that waits for an instant."""
        return self._lanes[state]

    def all(self) -> list[Lane]:
        """Return the lanes of all versions, and of removed versions with batches in flight."""
        for lane in self._closed:
            if lane.idle and lane.state not in self.timed:
                self.used.discard(lane.state)
                del self._lanes[lane.state]
        self._closed = [lane for lane in self._closed if lane.state in self._lanes]
        return list(self._lanes.values())

    def take_used(self) -> set[Lane]:
        """Return the lanes that got a batch or refused a request since the last call, or in which requests wait."""
        used = {self._lanes[state] for state in self.used | self.timed}
        self.used.clear()
        return used

    def loadable(self, content_id: str) -> Lane | None:
        """Return the lane of a version in the first of its pools that can load it."""
        route = self.routes.get(content_id)
        lanes = () if route is None else route.lanes
        chosen = next((lane for lane in lanes if route is not None and lane is route.lane), None)
        return next((lane for lane in lanes if lane.loadable), chosen)

    def answered_elsewhere(self) -> list[Lane]:
        """Return the lanes of preferred pools that could load a version which another pool answered since last time."""
        found: list[Lane] = []
        answered: dict[str, float] = {}
        for content_id, route in self.routes.items():
            if len(route.lanes) < 2:
                continue
            preferred = next((lane for lane in route.lanes if lane.loadable), None)
            if preferred is None or preferred is route.lane or preferred.ready:
                continue
            answered[content_id] = route.lanes[0].metrics.answered_requests  # those of all lanes
            if self._answered.get(content_id, math.inf) < answered[content_id]:
                found.append(preferred)
        self._answered = answered
        return found


class _Pending(dict[str, InFlightBatch]):
    def __init__(self, busy: asyncio.Event) -> None:
        super().__init__()
        self._busy = busy

    def __setitem__(self, name: str, batch: InFlightBatch) -> None:
        super().__setitem__(name, batch)
        self._busy.set()


class _Timed(set[LaneState]):
    def __init__(self, busy: asyncio.Event) -> None:
        super().__init__()
        self._busy = busy

    def add(self, state: LaneState) -> None:
        super().add(state)
        self._busy.set()


async def run_expirer(lanes: LaneTable, count_traffic: Callable[[], None]) -> None:
    """Tick until cancelled. `count_traffic`: called once per tick."""
    while True:
        if not (lanes.pending or lanes.timed):
            lanes.busy.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S - time.monotonic() % IDLE_S):
                    await lanes.busy.wait()
        if lanes.busy.is_set():
            await asyncio.sleep(TICK_S)
        try:
            _tick(lanes, time.monotonic())
            count_traffic()
        except Exception:
            log.exception("a tick failed")


def _tick(lanes: LaneTable, now: float) -> None:
    for batch in list(lanes.pending.values()):
        if batch.earliest <= now:
            lanes.of(batch.lane).recovery.expire(batch, now)
        if not batch.left and batch.put_at <= now - LEFT_S:
            lanes.of(batch.lane).recovery.leave(batch, now)
    for state in list(lanes.timed):
        lanes.of(state).tick(now)
