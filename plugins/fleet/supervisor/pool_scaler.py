"""pool_scaler: loop that follows the controller's decisions with worker processes of this machine.

decisions in Redis ─> follow ─> start workers at once; drain those that are too many, the highest numbers first

The supervisor owns the processes. Without a fresh decision (no controller, no Redis) everything stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from millstream.plugins.fleet.scaling import ScaleDecision
from millstream.plugins.fleet.supervisor.other_workers import OtherWorkers
from millstream.services.errors import Failure
from millstream.services.process.cancel import cancel_all
from millstream.services.supervisor.child import Child

log = logging.getLogger("millstream.supervisor")

EVERY_S = 0.5  # between two looks at the decisions

#: returns the fresh decisions of pools. Raises Failure.
ReadDecisions = Callable[[], Awaitable[Mapping[str, ScaleDecision]]]


class PoolScaler:
    """Starts and stops the workers of the pools whose size the controller decides.

    Args:
        sizes: least and largest number of workers of those pools, by the settings.
        children: returns the running workers of all pools, a list that is changed here.
        decisions: reads the decisions.
        start: starts the worker of a pool with a number.
        drain_s: how long a worker may take to stop.
        paused: returns whether a pool may not change now, as while one of its workers is replaced.
        show: shows a line about a change.
    """

    def __init__(
        self,
        sizes: Mapping[str, tuple[int, int]],
        children: Callable[[], list[Child]],
        decisions: ReadDecisions,
        start: Callable[[str, int], Child],
        drain_s: float,
        paused: Callable[[str], bool],
        show: Callable[[str], None],
    ) -> None:
        self._sizes = sizes
        self._children = children
        self._decisions = decisions
        self._start_worker = start
        self._drain_s = drain_s
        self._paused = paused
        self._show = show
        self._others = OtherWorkers(show)
        self._leaving: dict[Child, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def leaving(self) -> list[Child]:
        """The workers that drain."""
        return list(self._leaving)

    def start(self) -> None:
        if self._sizes:
            self._task = asyncio.create_task(self._run(), name="pool scaler")

    async def stop(self) -> None:
        """Start and stop no further worker. Those that drain are stopped by the caller."""
        if self._task is not None:
            await cancel_all([self._task])

    async def _run(self) -> None:
        while True:
            try:
                decisions = await self._decisions()
                self._look_for_others(decisions)
                self.follow({pool: one.wanted for pool, one in decisions.items()})
            except Failure as failure:
                log.debug("the pools keep their sizes: %s", failure.message)
            except Exception:
                log.exception("the pools could not be resized; trying again")
            await asyncio.sleep(EVERY_S)

    def _look_for_others(self, decisions: Mapping[str, ScaleDecision]) -> None:
        here = Counter(child.program.pool for child in (*self._children(), *self._leaving))
        for pool in self._sizes.keys() & decisions.keys():
            self._others.look(pool, decisions[pool].ready, here[pool], time.monotonic())

    def follow(self, wanted: Mapping[str, int]) -> None:
        """Start or stop workers, so that each pool that is not paused has as many as are wanted, within its limits."""
        for pool, (low, high) in self._sizes.items():
            if pool in wanted and not self._paused(pool):
                self._resize(pool, min(max(wanted[pool], low), high))

    def _resize(self, pool: str, wanted: int) -> None:
        running = {child.program.index: child for child in self._children() if child.program.pool == pool}
        before = len(running)
        if before == wanted:
            return
        self._show(f"pool {pool}: {wanted} workers, {before} before")
        # A number is free when its process has ended: it names the log and the series.
        taken = {*running, *(child.program.index for child in self._leaving if child.program.pool == pool)}
        free = (index for index in range(wanted + len(taken)) if index not in taken)
        for _ in range(wanted - before):
            self._children().append(self._start_worker(pool, next(free)))
        for index in sorted(running, reverse=True)[: max(0, before - wanted)]:
            self._drain(running[index])

    def _drain(self, child: Child) -> None:
        self._children().remove(child)
        task = asyncio.create_task(child.stop(self._drain_s), name=f"drain {child.program.name}")
        self._leaving[child] = task
        task.add_done_callback(lambda _: self._leaving.pop(child, None))
