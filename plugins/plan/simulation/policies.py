"""Who loads, and what goes for it: Millstream's own code, and two rules of the field to compare it with. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from millstream.plugins.fleet.planned import PlannedOrder
from millstream.plugins.plan.simulation.fleet_state import FleetState, QueuedLoad, SimulatedWorker
from millstream.plugins.plan.simulation.millstream import Millstream
from millstream.services.placement.line import Wait
from millstream.services.placement.views import Refusal, RefusalKind

_NOTHING_EVICTABLE = Refusal(RefusalKind.NOTHING_EVICTABLE, "all other models are pinned", 1.0)
_TOO_LARGE = Refusal(RefusalKind.TOO_LARGE, "it is larger than a worker", 1.0)


class Policy(Protocol):
    """Decides for a simulated fleet.

    `attempts`: workers that are asked to load a model before its calls are refused. `sees_records`: whether it knows of
    workers only what `published` and `ordered` tell it.
    """

    name: str
    attempts: int
    sees_records: bool

    def choose(self, pool: str, model: int, now: float, exclude: Collection[int]) -> int | Refusal:
        """Return the worker of a pool that is to load a model; `exclude`: workers that refused it."""
        ...

    def loading_pool(self, pools: Sequence[str], model: int) -> str:
        """Return the pool in which a model that none has is to be loaded; "": the first that loads it."""
        ...

    def is_worth_moving(self, pool: str, model: int, now: float) -> bool:
        """Return whether a preferred pool is to load a model that another pool answers."""
        ...

    def make_room(self, worker: SimulatedWorker, load: QueuedLoad, now: float) -> Sequence[int] | Wait | Refusal:
        """Return the models that a worker unloads for the first of its line."""
        ...

    def unload_ahead(self, worker: SimulatedWorker, now: float) -> Sequence[int]:
        """Return the models that a worker unloads after its last load has ended, for the next ones."""
        ...

    def ordered(self, worker: SimulatedWorker, model: int, now: float) -> None:
        """Take note that a worker was ordered to load a model for a call."""
        ...

    def published(self, worker: SimulatedWorker, now: float) -> None:
        """Take note of a worker's record."""
        ...

    def round(self, now: float) -> Sequence[PlannedOrder]:
        """Return what a controller orders in its round."""
        ...


class _LeastRecentlyUsed:
    """Unloads what was used longest ago. Kinder than Ray, which unloads models in use as well: loads wait in line."""

    name = ""
    attempts = 1
    sees_records = False  # kinder than reality: these rules know at once what each worker holds

    def __init__(self, state: FleetState, seed: int) -> None:
        self._state = state
        self._random = np.random.default_rng([seed, 3])
        self.models_max = dict.fromkeys(state.workers_of, 1 << 30)  # in a worker, by pool

    def make_room(self, worker: SimulatedWorker, load: QueuedLoad, now: float) -> Sequence[int] | Wait | Refusal:
        models, need = self._state.models, self._state.models[load.model].footprint.load_bytes
        missing = need - (worker.budget_bytes - self._state.account_bytes(worker))
        peaks = {
            other: models[other].footprint.peak_bytes for other, one in worker.instances.items() if one.loaded_at <= now
        }
        largest_peak = max(peaks.values(), default=0)
        surplus = len(worker.instances) + 1 - self.models_max[worker.pool]
        if missing <= 0 and surplus <= 0:
            return []
        victims: list[int] = []
        waits_until = math.inf
        for used, other in sorted((one.last_used, other) for other, one in worker.instances.items()):
            del used
            one = worker.instances[other]
            if self._state.must_stay(worker.pool, other):
                continue
            if one.busy_until > now or one.loaded_at > now:
                waits_until = min(waits_until, max(one.busy_until, now + 0.01))
                continue
            victims.append(other)
            del peaks[other]
            staying_peak = max(peaks.values(), default=0)
            missing -= models[other].footprint.resident_bytes + largest_peak - staying_peak
            largest_peak = staying_peak
            surplus -= 1
            if missing <= 0 and surplus <= 0:
                return victims
        if need > worker.budget_bytes:
            return _TOO_LARGE
        return Wait(waits_until) if waits_until < math.inf else _NOTHING_EVICTABLE

    def loading_pool(self, pools: Sequence[str], model: int) -> str:
        return ""

    def is_worth_moving(self, pool: str, model: int, now: float) -> bool:
        return True

    def unload_ahead(self, worker: SimulatedWorker, now: float) -> Sequence[int]:
        return ()

    def ordered(self, worker: SimulatedWorker, model: int, now: float) -> None:
        """Need no note: what a worker holds is looked up."""

    def published(self, worker: SimulatedWorker, now: float) -> None:
        """Need no note."""

    def round(self, now: float) -> Sequence[PlannedOrder]:
        return ()


class CountLru(_LeastRecentlyUsed):
    """Ray Serve's multiplexing: a number of models for each worker, the one with the fewer of two drawn workers loads.

    The number is what fits on the average. Where larger models do not fit, bytes are respected, too: Ray would run out
    of memory.
    """

    name = "count LRU"

    def __init__(self, state: FleetState, seed: int) -> None:
        super().__init__(state, seed)
        mean_bytes = float(np.mean([model.footprint.load_bytes for model in state.models]))
        self.models_max = {
            pool: max(1, int(of_pool[0].budget_bytes / mean_bytes)) for pool, of_pool in state.workers_of.items()
        }

    def choose(self, pool: str, model: int, now: float, exclude: Collection[int]) -> int | Refusal:
        workers, of_pool = self._state.workers, self._state.workers_of[pool]
        serving = [worker.index for worker in of_pool if not worker.draining]
        drawn: list[int] = self._random.choice(serving or [of_pool[0].index], size=2).tolist()
        return min(drawn, key=lambda at: (len(workers[at].instances) + len(workers[at].queue), len(workers[at].queue)))


class ByteLru(_LeastRecentlyUsed):
    """ModelMesh's rule: most free memory; if all are full, the oldest least recently used model; no brake on churn."""

    name = "byte LRU"
    close_s, close_share = 45.0, 0.1  # ages of least recently used models that count as equal

    def choose(self, pool: str, model: int, now: float, exclude: Collection[int]) -> int | Refusal:
        state, workers = self._state, self._state.workers_of[pool]
        need = state.models[model].footprint.load_bytes
        free = [
            worker.budget_bytes
            - state.account_bytes(worker)
            - sum(state.models[one.model].footprint.load_bytes for one in worker.queue)
            if not worker.draining
            else -1
            for worker in workers
        ]
        most = max(free)
        if most >= need:
            near = [
                worker.index for worker, one in zip(workers, free, strict=True) if one >= need and one > most * 0.75
            ]
            return int(self._random.choice(near))
        ages = [
            now - min((one.last_used for one in worker.instances.values() if one.loaded_at <= now), default=now)
            if not worker.draining
            else -1.0
            for worker in workers
        ]
        oldest = max(ages)
        bound = min(oldest - self.close_s, oldest * (1 - self.close_share))
        near = [worker.index for worker, age in zip(workers, ages, strict=True) if age >= bound]
        return int(self._random.choice(near))


POLICIES: dict[str, Callable[[FleetState, int], Policy]] = {
    "millstream": Millstream,
    "byte-lru": ByteLru,
    "count-lru": CountLru,
}
