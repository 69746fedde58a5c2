"""What the workers of a simulation hold. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from millstream.plugins.plan.simulation.models import SimulatedModel
from millstream.services.placement.preloads import OrderedLoads
from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import PlacedInstance, WorkerView

POOL = "cpu"  # of simulated workers, unless pools are named
RATE_S = 20.0  # time constant of the mean of calls a second, as in plugins/fleet/controller/survey.py


@dataclass(slots=True)
class SimulatedInstance:
    """An instance in a worker.

    Args:
        loaded_at: infinity while it loads.
        last_used: end of its last run; while it loads, when that began.
        busy_until: end of the runs that it has begun.
    """

    loaded_at: float = math.inf
    last_used: float = 0.0
    busy_until: float = 0.0


@dataclass(slots=True, eq=False)
class QueuedLoad:
    """A load that a worker was ordered to make and has not begun.

    Args:
        evict: whether it may unload others for it.
        called: whether calls wait for it.
    """

    model: int
    evict: bool = True
    called: bool = True


@dataclass(slots=True)
class SimulatedWorker:
    """A worker: what it holds, what it is to load, and when each of its run slots is free.

    Args:
        pool: its pool.
        speed: how many times as fast its runs are as those of the table of models.
        loads_max: loads that it makes at the same time.
        starts: how often its process was replaced.
        draining: whether it stops soon.
        ordered: its last loads.
        leaving_bytes: of models that are unloaded when their last run has ended.
        looks_at: when it looks next whether the first of its line can be loaded.
    """

    index: int
    budget_bytes: int
    free_at: list[float]
    pool: str = POOL
    speed: float = 1.0
    loads_max: int = 1
    used_bytes: int = 0
    instances: dict[int, SimulatedInstance] = field(default_factory=dict)
    queue: deque[QueuedLoad] = field(default_factory=deque)
    loads: int = 0  # in progress
    starts: int = 0
    draining: bool = False
    ordered: OrderedLoads = field(default_factory=OrderedLoads)
    leaving_bytes: int = 0
    looks_at: float = math.inf

    @property
    def name(self) -> str:
        return f"worker-{self.index}-0"


class FleetState:
    """Models, workers, who holds what, and the habits of the models' callers."""

    def __init__(self, models: list[SimulatedModel], workers: list[SimulatedWorker]) -> None:
        self.models = models
        self.workers = workers
        self.holders: list[list[int]] = [[] for _ in models]  # the workers that have it ready
        pools = tuple(dict.fromkeys(worker.pool for worker in workers))
        self.workers_of = {pool: [worker for worker in workers if worker.pool == pool] for pool in pools}
        self.pools_of = [model.pools or pools for model in models]  # the preferred pool first
        self.usage: list[Usage] = [NO_USAGE] * len(models)
        self.last_used: list[float] = [-math.inf] * len(models)
        self._rates: list[float] = [0.0] * len(models)  # calls a second at the last call

    def called(self, model: int, now: float) -> None:
        """Count a call in the habits of a model."""
        last = self.last_used[model]
        if last > -math.inf:
            self.usage[model] = self.usage[model].with_gap(now - last)
        self._rates[model] = self.calls_per_s(model, now) + 1 / RATE_S
        self.last_used[model] = now

    def calls_per_s(self, model: int, now: float) -> float:
        """Return the calls a second of a model in the last half minute."""
        return self._rates[model] * math.exp((self.last_used[model] - now) / RATE_S)

    def holders_in(self, pool: str, model: int) -> list[int]:
        """Return the workers of a pool that have a model ready."""
        if len(self.workers_of) == 1:
            return self.holders[model]
        return [at for at in self.holders[model] if self.workers[at].pool == pool]

    def account_bytes(self, worker: SimulatedWorker) -> int:
        """Return what a worker's account says: one batch runs at a time, so that only the largest peak counts."""
        models = self.models
        loaded = (model for model, one in worker.instances.items() if one.loaded_at < math.inf)
        return worker.used_bytes + max((models[model].footprint.peak_bytes for model in loaded), default=0)

    def must_stay(self, pool: str, model: int) -> bool:
        """Whether no instance of a model may be unloaded in a pool."""
        one = self.models[model]
        return one.pin or len(self.holders_in(pool, model)) <= one.instances_min > 0

    def view(self, worker: SimulatedWorker, now: float, *, line: bool = True) -> WorkerView:
        """Return a worker as its record would show it. `line`: with what waits to be loaded."""
        models, usage = self.models, self.usage
        instances = {}
        for model, one in worker.instances.items():
            name = models[model].name
            instances[name] = PlacedInstance(
                name,
                models[model].footprint,
                one.loaded_at,
                one.last_used,
                in_use=one.busy_until > now,
                pinned=self.must_stay(worker.pool, model),
                usage=usage[model],
            )
        used_bytes = self.account_bytes(worker)
        for load in worker.queue if line else ():
            need = models[load.model].footprint
            name = models[load.model].name
            instances[name] = PlacedInstance(name, need, math.inf, now, in_use=True)
            used_bytes += need.load_bytes
        return WorkerView(
            worker.name,
            worker.pool,
            worker.budget_bytes,
            used_bytes,
            worker.draining,
            instances,
            leaving_bytes=worker.leaving_bytes,
        )
