"""The fleet's part of a supervisor: the controller of this machine, and the sizes of its pools.

decisions in Redis ─> PoolScaler ─> start workers at once; drain those that are too many, the highest numbers first

The supervisor owns the processes. Without a fresh decision (no controller, no Redis) everything stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from millstream.plugins.fleet.controller.loops import LOGGER, NAME, ControllerLoops, pool_limits
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.plugins.fleet.scaling import ScaleDecision, is_fresh
from millstream.plugins.fleet.settings import FleetSettings
from millstream.services.errors import Failure
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.log_level import LogLevel
from millstream.services.queue.limited_client import FAREWELL_S_MAX, without_redis_after
from millstream.services.queue.log_levels import InstallationLevel
from millstream.services.settings import LOG_LEVELS, Settings, settings_of
from millstream.services.supervisor.parts import SupervisorParts
from millstream.services.supervisor.pool_specs import parse_pools

log = logging.getLogger("millstream.supervisor")

EVERY_S = 0.5  # between two looks at the decisions
ELSEWHERE_S = 30.0  # the record of a worker that was killed may outlive it, but not for so long

#: returns the fresh decisions of pools. Raises Failure.
ReadDecisions = Callable[[], Awaitable[Mapping[str, ScaleDecision]]]


class FleetPart:
    """Runs with one supervisor, from `start` until `stop`."""

    def __init__(self, parts: SupervisorParts) -> None:
        settings = parts.settings
        specs = parse_pools(settings.pools)
        self._scale_state = ScaleState(parts.address, parts.keys)
        sizes = {pool: (spec.least, spec.workers) for pool, spec in specs.items() if spec.elastic}
        self._scaler = PoolScaler(sizes, parts, self._decisions)
        self._controller: ControllerLoops | None = None
        self._show = parts.show
        self._unsized = "" if settings_of(settings, FleetSettings).controller else unsized_pools(settings)
        # Without gateways it is where they are.
        if settings_of(settings, FleetSettings).controller and settings.gateways:
            self._controller = ControllerLoops(settings, parts.address, parts.keys, pool_limits(settings))
        level = InstallationLevel(parts.address, parts.keys, NAME)
        self._log_level = LogLevel(NAME, settings.home / "run" / LOG_LEVELS, level.read, LOGGER)

    def start(self) -> None:
        self._scaler.start()
        if self._unsized:
            self._show(self._unsized)
        if self._controller is not None:
            self._log_level.start(signals=False)  # SIGUSR2 is the supervisor's
            self._controller.start()

    async def stop(self) -> None:
        await self._scaler.stop()
        self._log_level.stop()
        async with without_redis_after(FAREWELL_S_MAX):
            if self._controller is not None:
                await self._controller.stop()
            await self._scale_state.close()

    async def _decisions(self) -> Mapping[str, ScaleDecision]:
        decisions, now = await self._scale_state.decisions()
        return {pool: one for pool, one in decisions.items() if is_fresh(one, now)}


def unsized_pools(settings: Settings) -> str:
    """Return a warning of pools with MIN:MAX, about which no controller is to decide; "" if there are none."""
    elastic = [f"{pool}={spec.size}" for pool, spec in parse_pools(settings.pools).items() if spec.elastic]
    if not elastic or not settings.gateways:
        return ""
    return (
        f"--no-controller: --pool {','.join(elastic)} keeps the workers that it starts with, unless a controller runs "
        "elsewhere on the same Redis"
    )


def build(parts: SupervisorParts) -> FleetPart:
    """Return the fleet's part of a supervisor."""
    return FleetPart(parts)


class PoolScaler:
    """Starts and stops the workers of the pools whose size the controller decides.

    Args:
        sizes: least and largest number of workers of those pools, by the settings.
        parts: of the supervisor.
        decisions: reads the decisions.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, int]], parts: SupervisorParts, decisions: ReadDecisions) -> None:
        self._sizes = sizes
        self._parts = parts
        self._decisions = decisions
        self._elsewhere_since: dict[str, float] = {}
        self._told: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if self._sizes:
            self._tasks.append(asyncio.create_task(self._run(), name="pool scaler"))

    async def stop(self) -> None:
        """Start and stop no further worker. Those that drain are stopped by the supervisor."""
        await cancel_all(self._tasks)

    async def _run(self) -> None:
        while True:
            try:
                decisions = await self._decisions()
                self.look_elsewhere(decisions, time.monotonic())
                self.follow({pool: one.wanted for pool, one in decisions.items()})
            except Failure as failure:
                log.debug("the pools keep their sizes: %s", failure.message)
            except Exception:
                log.exception("the pools could not be resized; trying again")
            await asyncio.sleep(EVERY_S)

    def look_elsewhere(self, decisions: Mapping[str, ScaleDecision], now: float) -> None:
        """Tell of pools whose workers also run elsewhere: each `millstream up` would start all that are wanted."""
        here = Counter(child.program.pool for child in (*self._parts.workers(), *self._parts.draining()))
        for pool in self._sizes.keys() & decisions.keys():
            ready = decisions[pool].ready
            if ready <= here[pool]:
                self._elsewhere_since.pop(pool, None)
            elif now - self._elsewhere_since.setdefault(pool, now) >= ELSEWHERE_S and pool not in self._told:
                self._told.add(pool)
                self._parts.show(
                    f"pool {pool}: {ready - here[pool]} of its workers run elsewhere, and each `millstream up` that "
                    "scales it starts all that are wanted: give each machine a pool name of its own, or fixed sizes"
                )

    def follow(self, wanted: Mapping[str, int]) -> None:
        """Start or stop workers, so that each pool that may change has as many as are wanted, within its limits."""
        for pool, (low, high) in self._sizes.items():
            if pool in wanted and self._parts.may_resize(pool):
                self._resize(pool, min(max(wanted[pool], low), high))

    def _resize(self, pool: str, wanted: int) -> None:
        running = {child.program.index: child for child in self._parts.workers() if child.program.pool == pool}
        before = len(running)
        if before == wanted:
            return
        self._parts.show(f"pool {pool}: {wanted} workers, {before} before")
        # A number is free when its process has ended: it names the log and the series.
        draining = (child for child in self._parts.draining() if child.program.pool == pool)
        taken = {*running, *(child.program.index for child in draining)}
        free = (index for index in range(wanted + len(taken)) if index not in taken)
        for _ in range(wanted - before):
            self._parts.start_worker(pool, next(free))
        for index in sorted(running, reverse=True)[: max(0, before - wanted)]:
            self._parts.drain_worker(running[index])
