"""Loop that decides once a second how many workers each pool needs, while this process leads.

loads of gateways, records of workers ─> FactsOfPools ─> PoolPolicy of each pool ─> decisions in Redis, and as metrics

It starts and stops no process: actuators follow the decisions (the local supervisor, compose, Kubernetes by metrics).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from millstream.plugins.fleet.controller.autoscale.decision import Decision, Reason, ScaleLimits
from millstream.plugins.fleet.controller.autoscale.facts import FactsOfPools
from millstream.plugins.fleet.controller.autoscale.policy import PoolPolicy
from millstream.plugins.fleet.controller.metrics import ScaleMetrics
from millstream.plugins.fleet.scale_state import ScaleState
from millstream.plugins.fleet.scaling import DECISION_FRESH_S, ScaleDecision
from millstream.services.errors import Failure
from millstream.services.process.cancellation import cancel_all
from millstream.services.process.waits import next_tick
from millstream.services.queue.cluster_state import ClusterState

log = logging.getLogger("millstream.controller.autoscaler")

EVERY_S = 1.0  # between two decisions
STEADY_S = 6.0  # the same while no pool may change its size: decisions tell what runs, and stay fresh

#: limits of the pools that the settings name
LimitsOf = Mapping[str, ScaleLimits]


class Autoscaler:
    """Decides for all pools. Await `run` in the controller's event loop.

    Args:
        leads: returns whether this process leads.
        cluster_state: reads the records of workers.
        scale_state: reads loads and writes decisions.
        limits: of the pools in the settings.
        unnamed: limits of pools that the settings do not name.
        clock: returns monotonic seconds. The clock of Redis, which may be set, dates decisions, and nothing else.
    """

    def __init__(
        self,
        leads: Callable[[], bool],
        cluster_state: ClusterState,
        scale_state: ScaleState,
        limits: LimitsOf,
        unnamed: ScaleLimits,
        metrics: ScaleMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leads = leads
        self._cluster_state = cluster_state
        self._scale_state = scale_state
        self._limits = limits
        self._unnamed = unnamed
        self._scales = any(one.workers_min < one.workers_max for one in limits.values())
        self._metrics = metrics
        self._clock = clock
        self._facts = FactsOfPools()
        self._policies: dict[str, PoolPolicy] = {}
        self._wanted: dict[str, int] = {}
        self._problem = ""  # that was logged
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="autoscaler")

    async def stop(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])
        await self._scale_state.close()

    async def _run(self) -> None:
        while True:
            try:
                if self._leads():
                    await self.round()
                else:
                    self._not_leading()
                self._problem = ""
            except Failure as failure:
                if failure.message != self._problem:
                    log.warning("%s; trying again", failure.message)
                self._problem = failure.message
            except Exception:
                log.exception("the pools' sizes could not be decided; trying again")
            await next_tick(EVERY_S if self._scales or not self._policies else STEADY_S)

    def _not_leading(self) -> None:
        """Forget everything: a later lead begins anew, and keeps what it finds for a while."""
        if self._policies:
            self._policies, self._wanted, self._facts = {}, {}, FactsOfPools()
            self._metrics.not_leading()

    async def round(self) -> None:
        """Read, decide, publish. Raises Failure."""
        workers = await self._cluster_state.workers()
        loads = await self._scale_state.loads()
        before, redis_now = await self._scale_state.decisions()
        now = self._clock()
        used = {pool for one in loads.values() for pool in one.pools}
        pools = sorted({*self._limits, *used, *(worker.pool for worker in workers)})
        facts = self._facts.take(pools, loads, workers, now)
        decided: list[ScaleDecision] = []
        for pool in pools:
            policy = self._policies.get(pool)
            if policy is None:
                limits = self._limits.get(pool, self._unnamed)
                kept = kept_of(before.get(pool), limits, redis_now)
                policy = self._policies[pool] = PoolPolicy(pool, limits, kept)
            decision = policy.decide(facts[pool], now)
            self._note(decision)
            decided.append(record_of(decision, redis_now))
        for pool in self._policies.keys() - set(pools):
            del self._policies[pool]
        if not self._leads():  # it slept: another controller may have decided meanwhile
            return
        await self._scale_state.decide(decided, [one for one in decided if _changes(before.get(one.pool), one)])
        await self._scale_state.forget(before.keys() - set(pools))
        self._metrics.decided(decided)

    def _note(self, decision: Decision) -> None:
        """Log a change, and measure from now on how long the workers take that it wants."""
        if decision.reason == Reason.UNBOUNDED:  # it follows what runs
            return
        pool = decision.pool
        before = self._wanted.get(pool, max(decision.ready, decision.workers_min))
        self._wanted[pool] = decision.wanted
        self._facts.starts(pool).wanted(before, decision.wanted, decision.decided_at)
        if before != decision.wanted:
            log.info("pool %s: %d workers wanted, %d before: %s", pool, decision.wanted, before, decision.reason)


def _changes(before: ScaleDecision | None, now: ScaleDecision) -> bool:
    """Return whether a decision belongs in the history. Of a pool without limits none does: it follows what runs."""
    return now.reason != Reason.UNBOUNDED and (before is None or before.wanted != now.wanted)


def kept_of(before: ScaleDecision | None, limits: ScaleLimits, now: float) -> int:
    """Return the workers that an earlier leader wanted. Older decisions than `down_s` are about a load of the past."""
    if before is None or abs(now - before.decided_at) > max(limits.down_s, DECISION_FRESH_S):
        return 0
    return before.wanted


def record_of(decision: Decision, decided_at: float) -> ScaleDecision:
    """Return a decision as it is published. `decided_at`: now, on the Redis clock."""
    return ScaleDecision(
        pool=decision.pool,
        wanted=decision.wanted,
        ready=decision.ready,
        workers_min=decision.workers_min,
        workers_max=decision.workers_max,
        queue_rows=round(decision.queue_rows),
        oldest_wait_s=round(decision.oldest_wait_s, 3),
        arrival_rows_per_s=round(decision.arrival_rows_per_s, 3),
        capacity_rows_per_s=round(decision.capacity_rows_per_s, 3),
        utilisation=round(decision.utilisation, 4),
        reason=decision.reason,
        decided_at=round(decided_at, 3),
        start_s=round(decision.start_s, 3),
        explanation=decision.explanation,
    )
