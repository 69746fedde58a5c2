"""What a gateway, the workers and the controller decide in a simulation, with the code that they run. Pure.

records of workers ─> published ─> a Fleet for the gateway, views for the controller
call of a model that no worker has ─> choose ─(worker)─> make_room; every round_s: round ─> plan ─> orders
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millstream.services.placement.eviction import make_room
from millstream.services.placement.fleet import Fleet
from millstream.services.placement.planned import Plan, PlannedOrder, ServedVersion
from millstream.services.placement.planner import plan
from millstream.services.placement.simulation.fleet_state import POOL, FleetState, SimulatedWorker
from millstream.services.placement.views import Refusal, WorkerView

#: How old the record of a worker may be in which nothing was loaded or unloaded. Real ones show calls up to 5 s late.
REFRESH_S = 10.0


class Millstream:
    """The code of this package: choice by price, eviction by cost, the planner's rounds."""

    name = "millstream"
    attempts = 3
    sees_records = True

    def __init__(self, state: FleetState, seed: int) -> None:
        del seed
        self._state = state
        self._fleet = Fleet()  # of the gateway
        self._records: dict[int, WorkerView] = {}  # as the controller reads them
        self._index = {worker.name: worker.index for worker in state.workers}
        self._names = {model.name: at for at, model in enumerate(state.models)}
        self._footprints = [{POOL: model.footprint} for model in state.models]
        self._plan = Plan()
        self._refreshed_at = 0.0
        for worker in state.workers:
            self.published(worker, 0.0)

    def choose(self, model: int, now: float, exclude: Collection[int]) -> int | Refusal:
        one = self._state.models[model]
        self._refresh(now)
        refused = [self._state.workers[at].name for at in exclude]
        chosen = self._fleet.choose(one.name, one.footprint, now, 1, refused)
        if isinstance(chosen, Refusal):
            refusal, chosen = chosen, self._fleet.ranked(one.name, 1, refused)
            if not chosen:
                return refusal
        return self._index[chosen[0]]

    def make_room(self, worker: SimulatedWorker, model: int, now: float) -> Sequence[int] | Refusal:
        view = self._state.view(worker, now)
        victims = make_room(view, self._state.models[model].footprint, now)
        return victims if isinstance(victims, Refusal) else [self._names[name] for name in victims]

    def ordered(self, worker: SimulatedWorker, model: int, now: float) -> None:
        one = self._state.models[model]
        self._fleet.order(worker.name, one.name, one.footprint, now)

    def published(self, worker: SimulatedWorker, now: float) -> None:
        view = self._state.view(worker, now)
        self._records[worker.index] = view
        self._fleet.update(view)

    def round(self, now: float) -> Sequence[PlannedOrder]:
        self._refresh(now)
        self._plan = plan(list(self._records.values()), self._versions(now), self._plan, now)
        return self._plan.orders

    def _refresh(self, now: float) -> None:
        if now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        for worker in self._state.workers:
            self.published(worker, now)

    def _versions(self, now: float) -> list[ServedVersion]:
        """Return the models that a round can order something for: the others have neither an instance nor a habit."""
        state = self._state
        held = {model for worker in state.workers for model in worker.instances}
        return [
            ServedVersion(
                one.name,
                (POOL,),
                self._footprints[at],
                one.instances_min,
                one.instances_max,
                one.idle_s,
                one.pin,
                state.calls_per_s(at, now),
                one.run_s,
                state.usage[at],
                max(0.0, state.last_used[at]),
            )
            for at, one in enumerate(state.models)
            if at in held or one.instances_min or state.usage[at].period_s
        ]
