"""Who loads, and what goes for it: Millstream's own code, and two rules of the field to compare it with. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from millstream.services.placement.eviction import make_room
from millstream.services.placement.fleet import Fleet
from millstream.services.placement.planner import PREFETCH_LEAD_S, PREFETCH_WORTH, prefetch_in
from millstream.services.placement.room import RESIDENCE_LOADS
from millstream.services.placement.simulation.fleet_state import FleetState, SimulatedWorker
from millstream.services.placement.views import Refusal, RefusalKind

#: How old the view of a worker may be in which nothing was loaded or unloaded. Records are renewed twice a second; here
#: seldom, to save time.
REFRESH_S = 30.0
_NOTHING_EVICTABLE = Refusal(RefusalKind.NOTHING_EVICTABLE, "all other models are in use or pinned", 1.0)
_THRASHING = Refusal(RefusalKind.THRASHING, "the least recently used model was loaded a moment ago", 1.0)


class Policy(Protocol):
    """Decides for a simulated fleet."""

    name: str

    def choose(self, model: int, now: float) -> int | Refusal:
        """Return the worker that is to load a model."""
        ...

    def make_room(self, worker: SimulatedWorker, model: int, now: float) -> list[int] | Refusal:
        """Return the models that a worker unloads for another one."""
        ...

    def changed(self, worker: SimulatedWorker, now: float) -> None:
        """Take note that a worker was ordered to load, loaded or unloaded."""
        ...

    def next_prefetch(self, model: int) -> float | None:
        """Return the instant at which to ask `prefetch` for a model that was called just now; None: not at all."""
        ...

    def prefetch(self, model: int, now: float) -> int | None:
        """Return the worker that is to load a model before its call; None: no worker."""
        ...


class Millstream:
    """The code of this package: choice by price, eviction by cost, prefetch of models called like clockwork."""

    name = "millstream"

    def __init__(self, state: FleetState, seed: int) -> None:
        del seed
        self._state = state
        self._fleet = Fleet()
        self._index = {worker.name: worker.index for worker in state.workers}
        self._names = {model.name: at for at, model in enumerate(state.models)}
        self._refreshed_at = -1.0
        self._refresh(0.0, 0.0)

    def choose(self, model: int, now: float) -> int | Refusal:
        one = self._state.models[model]
        self._refresh(now, REFRESH_S)
        chosen = self._fleet.choose(one.name, one.footprint, now, limit=1)
        if isinstance(chosen, Refusal) and self._refresh(now, 0.0):
            chosen = self._fleet.choose(one.name, one.footprint, now, limit=1)
        return chosen if isinstance(chosen, Refusal) else self._index[chosen[0]]

    def make_room(self, worker: SimulatedWorker, model: int, now: float) -> list[int] | Refusal:
        view = self._state.view(worker, now)
        victims = make_room(view, self._state.models[model].footprint, now)
        return victims if isinstance(victims, Refusal) else [self._names[name] for name in victims]

    def changed(self, worker: SimulatedWorker, now: float) -> None:
        self._fleet.update(self._state.view(worker, now))

    def _refresh(self, now: float, age_s: float) -> bool:
        """Look at all workers again if the last look is older than `age_s`; return whether it was."""
        if now - self._refreshed_at <= age_s:
            return False
        self._refreshed_at = now
        for worker in self._state.workers:
            self.changed(worker, now)
        return True

    def next_prefetch(self, model: int) -> float | None:
        usage = self._state.usage[model]
        if not usage.period_s:
            return None
        lead_s = self._state.models[model].footprint.load_s + PREFETCH_LEAD_S
        return self._state.last_used[model] + usage.period_s - lead_s

    def prefetch(self, model: int, now: float) -> int | None:
        one, usage = self._state.models[model], self._state.usage[model]
        if prefetch_in(usage, one.footprint.load_s, self._state.last_used[model], now) is None:
            return None
        self._refresh(now, REFRESH_S)
        offers = self._fleet.offers(one.name, one.footprint, now, limit=1)
        if isinstance(offers, Refusal) or offers[0][1] > PREFETCH_WORTH * one.footprint.load_s:
            return None
        return self._index[offers[0][0]]


class _LeastRecentlyUsed:
    """Unloads what was used longest ago. Kinder than Ray, which unloads models in use as well."""

    name = ""
    models_max = 1 << 30  # in a worker
    residence_loads = 0.0  # an instance stays for this multiple of the load time

    def __init__(self, state: FleetState, seed: int) -> None:
        self._state = state
        self._random = np.random.default_rng([seed, 3])

    def make_room(self, worker: SimulatedWorker, model: int, now: float) -> list[int] | Refusal:
        models = self._state.models
        missing = models[model].footprint.load_bytes - (worker.budget_bytes - worker.used_bytes)
        peaks = {
            other: models[other].footprint.peak_bytes for other, one in worker.instances.items() if one.loaded_at <= now
        }
        largest_peak = max(peaks.values(), default=0)
        surplus = len(worker.instances) + 1 - self.models_max
        if missing <= 0 and surplus <= 0:
            return []
        victims = []
        for used, other in sorted((one.last_used, other) for other, one in worker.instances.items()):
            del used
            one = worker.instances[other]
            if models[other].pin or one.busy_until > now or one.loaded_at > now:
                continue
            if now - one.loaded_at < self.residence_loads * models[other].footprint.load_s:
                return _THRASHING
            victims.append(other)
            del peaks[other]
            staying_peak = max(peaks.values(), default=0)
            missing -= models[other].footprint.resident_bytes + largest_peak - staying_peak
            largest_peak = staying_peak
            surplus -= 1
            if missing <= 0 and surplus <= 0:
                return victims
        return _NOTHING_EVICTABLE

    def changed(self, worker: SimulatedWorker, now: float) -> None:
        """Need no note: what a worker holds is looked up."""

    def next_prefetch(self, model: int) -> float | None:
        return None

    def prefetch(self, model: int, now: float) -> int | None:
        return None


class CountLru(_LeastRecentlyUsed):
    """Ray Serve's multiplexing: a number of models for each worker, the one with the fewer of two drawn workers loads.

    The number is what fits on the average. Where larger models do not fit, bytes are respected, too: Ray would run out
    of memory.
    """

    name = "count LRU"

    def __init__(self, state: FleetState, seed: int) -> None:
        super().__init__(state, seed)
        mean_bytes = float(np.mean([model.footprint.load_bytes for model in state.models]))
        self.models_max = max(1, int(state.workers[0].budget_bytes / mean_bytes))

    def choose(self, model: int, now: float) -> int | Refusal:
        workers = self._state.workers
        drawn: list[int] = self._random.integers(len(workers), size=2).tolist()
        return min(drawn, key=lambda at: (len(workers[at].instances) + len(workers[at].queue), len(workers[at].queue)))


class ByteLru(_LeastRecentlyUsed):
    """ModelMesh's rule: most free memory; if all are full, the oldest least recently used model; a brake on churn."""

    name = "byte LRU"
    residence_loads = RESIDENCE_LOADS
    close_s, close_share = 45.0, 0.1  # ages of least recently used models that count as equal

    def choose(self, model: int, now: float) -> int | Refusal:
        state = self._state
        need = state.models[model].footprint.load_bytes
        free = [
            worker.budget_bytes
            - worker.used_bytes
            - sum(state.models[one.model].footprint.load_bytes for one in worker.queue)
            for worker in state.workers
        ]
        most = max(free)
        if most >= need:
            near = [at for at, one in enumerate(free) if one >= need and one > most * 0.75]
            return int(self._random.choice(near))
        ages = [
            now - min((one.last_used for one in worker.instances.values() if one.loaded_at <= now), default=now)
            for worker in state.workers
        ]
        oldest = max(ages)
        bound = min(oldest - self.close_s, oldest * (1 - self.close_share))
        near = [at for at, age in enumerate(ages) if age >= bound]
        return int(self._random.choice(near))


POLICIES: dict[str, Callable[[FleetState, int], Policy]] = {
    "millstream": Millstream,
    "byte-lru": ByteLru,
    "count-lru": CountLru,
}
