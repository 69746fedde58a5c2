"""Turns what gateways and workers publish into the facts that the policy decides on. Pure.

GatewayLoads of each gateway (counters) ─> differences ─┐
WorkerRecords ─> ready workers, load times, start times ┴─> PoolFacts by pool
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.plugins.fleet.controller.autoscale.decision import PoolFacts
from millstream.plugins.fleet.scaling import GatewayLoads, PoolLoad
from millstream.services.wire.records import State, WorkerRecord

ROW_S_DEFAULT = 0.01  # of rows whose run time no worker has measured yet
EMPTY_S = 3.0  # a worker that follows no state of the repository for this long found an empty one
ROW_KEPT_SHARE = 0.9  # weight of earlier rows in the mean time of a row, at each decision with rows
ROW_S_MIN = 1e-9  # a mean time that is shorter is none: capacities stay finite
MEASURED_MAX = 5  # start times in the mean: the last ones
PROCESS_S_DEFAULT = 4.0  # start of a process, without its loads, while none was measured
WAITED_S_MAX = 600.0  # a worker that comes later than this was not started for the decision
WAITING_MAX = 1024  # decisions that are remembered
GATEWAYS_MAX = 256  # whose counters are remembered; beyond, those that have not reported for the longest are forgotten

_NONE = PoolLoad()
_NOTHING = GatewayLoads()
_LOADING = frozenset({State.LOADING, State.WARMING})


class Starts:
    """The start times of one pool. Instants are passed in."""

    def __init__(self) -> None:
        self._known: frozenset[str] | None = None  # workers that served in the round before
        self._awaited: deque[float] = deque(maxlen=WAITING_MAX)  # when each worker was wanted that does not serve yet
        self._measured_s: deque[float] = deque(maxlen=MEASURED_MAX)

    def wanted(self, before: int, now_wanted: int, now: float) -> None:
        """Record a decision that wants more or fewer workers than the one before."""
        for _ in range(now_wanted - before):
            self._awaited.append(now)
        for _ in range(min(before - now_wanted, len(self._awaited))):
            self._awaited.pop()

    def ready(self, workers: Collection[str], now: float) -> None:
        """Record the workers that serve now. The first call measures none."""
        known, self._known = self._known, frozenset(workers)
        if known is None:
            return
        while self._awaited and now - self._awaited[0] > WAITED_S_MAX:
            self._awaited.popleft()
        for _ in self._known - known:
            if self._awaited:
                self._measured_s.append(now - self._awaited.popleft())

    def start_s(self, load_s: float) -> float:
        """Return the mean of the last start times. `load_s`: of the slowest version, while none was measured."""
        if not self._measured_s:
            return PROCESS_S_DEFAULT + load_s
        return sum(self._measured_s) / len(self._measured_s)


@dataclass(slots=True)
class _Pool:
    """What is remembered of a pool between two decisions."""

    rows: float = 0.0  # measured ones, older ones weighing less
    work_s: float = 0.0
    run_s: float = 0.0
    load_s: float = 0.0  # of its slowest version
    starts: Starts = field(default_factory=Starts)
    seen: dict[str, float] = field(default_factory=dict)  # worker -> when it was first seen
    answered: frozenset[str] = frozenset()  # workers that have had an instance that answers

    @property
    def row_s(self) -> float:
        row_s = self.work_s / self.rows if self.rows else 0.0
        return row_s if row_s >= ROW_S_MIN else 0.0


class _Reported(NamedTuple):
    """The counters of a gateway, and when they were read last."""

    at: float
    loads: GatewayLoads


class FactsOfPools:
    """Remembers the counters of the round before, and those of gateways that were not to be seen in it."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._round_at = 0.0
        self._before: dict[str, _Reported] = {}
        self._pools: dict[str, _Pool] = {}

    def starts(self, pool: str) -> Starts:
        """Return the measured start times of a pool's workers."""
        return self._pools.setdefault(pool, _Pool()).starts

    def take(
        self,
        pools: Sequence[str],
        loads: Mapping[str, GatewayLoads],
        workers: Sequence[WorkerRecord],
        now: float,
    ) -> dict[str, PoolFacts]:
        """Return the facts of pools. The first call counts no arrivals: it does not know since when they are.

        Args:
            pools: their names.
            loads: what the live gateways counted; empty for a moment after Redis lost its data.
            workers: the live workers.
            now: seconds on a monotonic clock.
        """
        arrived = {name: (one, *self._counted_before(name, one, now)) for name, one in loads.items()}
        self._began = now if self._began is None else self._began
        self._round_at = now
        self._remember(loads, now)
        found: dict[str, PoolFacts] = {}
        for name in pools:
            pool = self._pools.setdefault(name, _Pool())
            rows = work_s = unmeasured = 0.0
            now_loads = [one.pools.get(name, _NONE) for one in loads.values()]
            for one, before, share in arrived.values():
                load, was = one.pools.get(name, _NONE), before.pools.get(name, _NONE)
                rows += max(0, load.rows - was.rows) * share
                work_s += max(0.0, load.work_s - was.work_s) * share
                unmeasured += max(0, load.unmeasured_rows - was.unmeasured_rows) * share
            found[name] = self._facts(pool, name, now_loads, (rows, work_s, unmeasured), workers, now)
        return found

    def _counted_before(self, gateway: str, loads: GatewayLoads, now: float) -> tuple[GatewayLoads, float]:
        """Return the counters from which a gateway's arrivals count, and which share of them is of this round.

        What a gateway counted while it could not report spreads over that time. A gateway that was never seen counts
        from its start only if it is younger than this object: what an older one counted is the past.
        """
        known = self._before.get(gateway)
        if known is not None:
            missing_s, round_s = now - known.at, now - self._round_at
            return known.loads, round_s / missing_s if missing_s > round_s else 1.0
        new = self._began is not None and loads.counted_s <= now - self._began
        return (_NOTHING if new else loads), 1.0

    def _remember(self, loads: Mapping[str, GatewayLoads], now: float) -> None:
        absent = {name: one for name, one in self._before.items() if name not in loads}
        for name in list(absent)[: max(0, len(absent) + len(loads) - GATEWAYS_MAX)]:
            del absent[name]
        self._before = absent | {name: _Reported(now, one) for name, one in loads.items()}

    @staticmethod
    def _facts(
        pool: _Pool,
        name: str,
        loads: Sequence[PoolLoad],
        arrived: tuple[float, float, float],
        workers: Sequence[WorkerRecord],
        now: float,
    ) -> PoolFacts:
        rows, work_s, unmeasured = arrived
        measured = rows - unmeasured
        if measured > 0 and work_s > 0:
            pool.rows = pool.rows * ROW_KEPT_SHARE + measured
            pool.work_s = pool.work_s * ROW_KEPT_SHARE + work_s
        mine = [worker for worker in workers if worker.pool == name]
        pool.seen = {worker.id: pool.seen.get(worker.id, now) for worker in mine}
        answering = {worker.id for worker in mine if any(one.state is State.READY for one in worker.instances)}
        pool.answered = (pool.answered & pool.seen.keys()) | answering
        ready = [
            worker.id
            for worker in mine
            if serves(worker, now - pool.seen[worker.id], answered=worker.id in pool.answered)
        ]
        pool.starts.ready(ready, now)
        pool.load_s = max([one.load_s for worker in mine for one in worker.instances], default=0.0) or pool.load_s
        pool.run_s = max((load.run_s for load in loads), default=0.0) or pool.run_s
        row_s = pool.row_s or ROW_S_DEFAULT
        queue_rows = sum(load.queue_rows for load in loads)
        queue_work_s = sum(load.queue_work_s for load in loads)
        return PoolFacts(
            rows=rows,
            work_s=work_s + unmeasured * row_s,
            queue_rows=queue_rows,
            queue_work_s=queue_work_s or queue_rows * row_s,
            oldest_wait_s=max((load.oldest_wait_s for load in loads), default=0.0),
            ready=len(ready),
            start_s=pool.starts.start_s(pool.load_s),
            run_s=pool.run_s,
            row_s=pool.row_s,
            running=sum(not worker.draining for worker in mine),
        )


def serves(worker: WorkerRecord, known_s: float, *, answered: bool) -> bool:
    """Return whether a worker takes requests: it follows the repository, and has loaded what it loads at its start.

    A worker that loaded nothing because every load failed does not. One that has unloaded what was idle does: it loads
    that with the next call.

    Args:
        worker: its record.
        known_s: for how long it is known; in an empty repository it has no state that it could follow.
        answered: whether an instance of it has been ready since it is known.
    """
    if worker.draining or (not worker.token and known_s < EMPTY_S):
        return False
    states = {one.state for one in worker.instances}
    if State.READY in states:
        return True
    return not states & _LOADING and (answered or State.FAILED not in states)
