"""Loop that publishes what this gateway counted, and reads the decisions of the controller.

LoadBook ─> loads in Redis          decisions in Redis ─> asleep pools, start times
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from millstream.gateway.parts import GatewayParts
from millstream.gateway.scheduling.lane import Lane
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.plugins.fleet.scaling import GatewayLoads, PoolLoad, ScaleDecision, is_fresh
from millstream.services.errors import Failure
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.waits import next_tick
from millstream.services.queue.limited_client import FAREWELL_S_MAX, without_redis_after

log = logging.getLogger("millstream.scaling")

EVERY_S = 0.5  # between two reports: a request wakes a pool without workers within this time and a decision
RUN_S_MAX = 86_400.0  # run times beyond count as this: a profile may say anything
REPEAT_S = 2.0  # between two that say the same: half of the life of a report is left for one that is lost
STEADY_S = 4.0  # the same where no pool may change its size: nobody waits for what the report says


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

    async def changes(self, pool: str) -> list[ScaleDecision]:
        """Return the last decisions that changed the size of a pool, the newest first. Raises Failure."""
        return await self._scale_state.changes(pool)

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
            await next_tick(EVERY_S)

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
        fresh = {pool: one for pool, one in decisions.items() if is_fresh(one, redis_now)}
        scaled = {pool: one for pool, one in fresh.items() if one.workers_max}
        self._reported, self._repeat_at = loads.pools, now + (REPEAT_S if scaled or not decisions else STEADY_S)
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


@dataclass(slots=True)
class _Seen:
    """A lane at the last report."""

    done: int = 0
    inside: int = 0  # rows that waited or ran
    row_s: float = 0.0  # as last measured: a pool without workers has no measurements


@dataclass(slots=True)
class _Sums:
    """The counters of one pool."""

    rows: int = 0
    work_s: float = 0.0
    unmeasured_rows: int = 0


class LoadBook:
    """Counts what arrives and waits in one gateway, by pool, from what its lanes know: no request costs anything.

    Rows that arrived are those that were answered or refused, and the change of those that wait or run.
    """

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Lane, _Seen] = WeakKeyDictionary()
        self._inside: set[Lane] = set()  # lanes with rows inside at the last report
        self._sums: dict[str, _Sums] = {}
        self._began: float | None = None  # instant of the first report

    def count(self, used: Iterable[Lane], running: Mapping[Lane, int], now: float) -> GatewayLoads:
        """Return what was counted until now.

        Args:
            used: lanes that got a batch or refused a request since the last call, or in which requests wait.
            running: rows in flight of each lane that has some.
            now: the current instant (monotonic).
        """
        self._began = now if self._began is None else self._began
        queues: dict[str, PoolLoad] = {}
        lanes = {*used, *self._inside, *running}
        self._inside = set()
        for lane in lanes:
            seen = self._seen.setdefault(lane, _Seen())
            inside, done = lane.rows_waiting + running.get(lane, 0), lane.state.rows_done
            arrived = max(0, done - seen.done + inside - seen.inside)
            seen.done, seen.inside = done, inside
            seen.row_s = min(lane.policy.row_s or seen.row_s, RUN_S_MAX)
            sums = self._sums.setdefault(lane.pool, _Sums())
            sums.rows += arrived
            sums.work_s += arrived * seen.row_s
            if not seen.row_s:
                sums.unmeasured_rows += arrived
            if inside:
                self._inside.add(lane)
            queues[lane.pool] = _with_lane(queues.get(lane.pool, _EMPTY), lane, inside, seen.row_s, now)
        return GatewayLoads(
            pools={
                pool: queues.get(pool, _EMPTY).model_copy(
                    update={
                        "rows": sums.rows,
                        "work_s": round(sums.work_s, 6),
                        "unmeasured_rows": sums.unmeasured_rows,
                    }
                )
                for pool, sums in self._sums.items()
            },
            counted_s=round(now - self._began, 3),
        )


_EMPTY = PoolLoad()


def _with_lane(load: PoolLoad, lane: Lane, inside: int, row_s: float, now: float) -> PoolLoad:
    """Return the queue of a pool with that of one more lane."""
    return PoolLoad(
        queue_rows=load.queue_rows + inside,
        queue_work_s=load.queue_work_s + inside * row_s,
        oldest_wait_s=max(load.oldest_wait_s, now - lane.oldest_arrival),
        run_s=max(load.run_s, min(lane.policy.full_batch_s, RUN_S_MAX)),
    )
