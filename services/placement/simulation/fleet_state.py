"""What the workers of a simulation hold. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from millstream.services.placement.simulation.models import SimulatedModel
from millstream.services.placement.usage import NO_USAGE, Usage
from millstream.services.placement.views import PlacedInstance, WorkerView


@dataclass(slots=True)
class SimulatedInstance:
    """An instance in a worker; `loaded_at` is infinity while it loads."""

    loaded_at: float = math.inf
    last_used: float = 0.0
    busy_until: float = 0.0


@dataclass(slots=True)
class Load:
    """A load that a worker was ordered to make, and the instants of the calls that wait for it."""

    model: int
    waiting: list[float] = field(default_factory=list)


@dataclass(slots=True)
class SimulatedWorker:
    """A worker: what it holds, what it is to load, and when each of its run slots is free."""

    index: int
    budget_bytes: int
    free_at: list[float]
    used_bytes: int = 0  # as `FleetState.count` counts it
    instances: dict[int, SimulatedInstance] = field(default_factory=dict)
    queue: deque[Load] = field(default_factory=deque)
    loads: int = 0  # in progress

    @property
    def name(self) -> str:
        return f"worker-{self.index}-0"


class FleetState:
    """Models, workers, who holds what, and the habits of the models' callers."""

    def __init__(self, models: list[SimulatedModel], workers: list[SimulatedWorker]) -> None:
        self.models = models
        self.workers = workers
        self.holders = [-1] * len(models)  # the worker that has it ready; -1: none
        self.usage: list[Usage] = [NO_USAGE] * len(models)
        self.last_used: list[float] = [-math.inf] * len(models)

    def called(self, model: int, now: float) -> None:
        """Count a call in the habits of a model."""
        last = self.last_used[model]
        if last > -math.inf:
            self.usage[model] = self.usage[model].with_gap(now - last)
        self.last_used[model] = now

    def count(self, worker: SimulatedWorker, now: float) -> None:
        """Count what a worker uses: its instances, the largest peak of them, and what loads in progress take."""
        resident_bytes = peak_bytes = 0
        for model, one in worker.instances.items():
            footprint = self.models[model].footprint
            if one.loaded_at > now:
                resident_bytes += footprint.load_bytes
            else:
                resident_bytes += footprint.resident_bytes
                peak_bytes = max(peak_bytes, footprint.peak_bytes)
        worker.used_bytes = resident_bytes + peak_bytes

    def view(self, worker: SimulatedWorker, now: float) -> WorkerView:
        """Return a worker as its record would show it."""
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
                pinned=models[model].pin,
                usage=usage[model],
            )
        used_bytes = worker.used_bytes
        for load in worker.queue:
            need = models[load.model].footprint
            name = models[load.model].name
            instances[name] = PlacedInstance(name, need, math.inf, now, in_use=True)
            used_bytes += need.load_bytes
        return WorkerView(worker.name, "cpu", worker.budget_bytes, used_bytes, instances=instances)
