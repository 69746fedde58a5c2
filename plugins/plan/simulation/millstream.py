"""What a gateway, the workers and the controller decide in a simulation, with the code that they run. Pure.

records of workers ─> published ─> a Fleet for the gateway, views for the controller
call of a model that no worker has ─> choose ─(worker)─> its line ─> make_room ─> load ─> unload_ahead
every round_s: round ─> plan ─> orders
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millstream.plugins.fleet.planned import Plan, PlannedOrder, ServedVersion
from millstream.plugins.fleet.planner import plan
from millstream.plugins.plan.simulation.fleet_state import FleetState, QueuedLoad, SimulatedWorker
from millstream.services.placement.fleet import Fleet, PoolOffer, is_worth_moving, without_unloading
from millstream.services.placement.line import Wait, turn
from millstream.services.placement.preloads import headroom_of, unloaded_ahead
from millstream.services.placement.views import UNLIMITED_BYTES, Refusal, WorkerView

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
        self._fleets = {pool: Fleet() for pool in state.workers_of}  # of the gateway
        self._records: dict[int, WorkerView] = {}  # as the controller reads them
        self._index = {worker.name: worker.index for worker in state.workers}
        self._names = {model.name: at for at, model in enumerate(state.models)}
        self._footprints = [
            dict.fromkeys(pools, model.footprint) for model, pools in zip(state.models, state.pools_of, strict=True)
        ]
        self._plan = Plan()
        self._refreshed_at = 0.0
        for worker in state.workers:
            self.published(worker, 0.0)

    def choose(self, pool: str, model: int, now: float, exclude: Collection[int]) -> int | Refusal:
        one, fleet = self._state.models[model], self._fleets[pool]
        self._refresh(now)
        refused = [self._state.workers[at].name for at in exclude]
        chosen = fleet.choose(one.name, one.footprint, now, 1, refused)
        if isinstance(chosen, Refusal):
            refusal, chosen = chosen, fleet.ranked(one.name, 1, refused)
            if not chosen:
                return refusal
        return self._index[chosen[0]]

    def loading_pool(self, pools: Sequence[str], model: int) -> str:
        need = self._state.models[model].footprint
        return without_unloading(PoolOffer(pool, self._fleets[pool], need) for pool in pools)

    def is_worth_moving(self, pool: str, model: int, now: float) -> bool:
        one = self._state.models[model]
        self._refresh(now)
        return is_worth_moving(self._fleets[pool], one.name, one.footprint, now)

    def make_room(self, worker: SimulatedWorker, load: QueuedLoad, now: float) -> Sequence[int] | Wait | Refusal:
        view = self._state.view(worker, now, line=False)
        victims = turn(view, self._state.models[load.model].footprint, now, called=load.called)
        return victims if isinstance(victims, Wait | Refusal) else [self._names[name] for name in victims]

    def unload_ahead(self, worker: SimulatedWorker, now: float) -> Sequence[int]:
        expected = worker.ordered.take()
        headroom = None if expected is None else headroom_of(expected.footprint, worker.budget_bytes, UNLIMITED_BYTES)
        if expected is None or headroom is None:
            return ()
        view = self._state.view(worker, now)
        if view.has_room(headroom.low):
            return ()
        return [self._names[name] for name in unloaded_ahead(view, headroom, expected.gap_s, now)]

    def ordered(self, worker: SimulatedWorker, model: int, now: float) -> None:
        one = self._state.models[model]
        self._fleets[worker.pool].order(worker.name, one.name, one.footprint, now)

    def published(self, worker: SimulatedWorker, now: float) -> None:
        view = self._state.view(worker, now)
        self._records[worker.index] = view
        self._fleets[worker.pool].update(view)

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
                state.pools_of[at],
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
