"""What one round of the planner knows: who holds what, how busy each worker is, and what was ordered. Pure.

Orders of this round, and those of earlier ones that no worker has shown yet, count as carried out. So a round plans no
load twice, and its orders together stay within each worker's budget.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from millstream.plugins.fleet.planned import PlannedOrder, ServedVersion
from millstream.services.placement.fleet import Fleet
from millstream.services.placement.prediction import expected
from millstream.services.placement.room import Room, evictable
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, WorkerView
from millstream.services.wire.orders import OrderReason

Holder = tuple[str, PlacedInstance]  # a worker's id, and its instance of the version in question

SOON_S = (
    600.0  # within which a version on a worker that stops must be likely to be called, to be loaded elsewhere first
)
ORDERS_MAX = 100  # of a round; the next one follows in seconds
WORKER_LOADS_MAX = 2  # loads that a worker has begun or been ordered: more would wait behind each other
ORDER_LIFE_S = 60.0  # within which a worker shows what became of an order; then the order may be repeated
#: Share of a budget that stays free beside a copy that is not needed but nice to have; with less, surplus copies go.
SPARE_SHARE = 0.25
SHORT_SHARE = 0.05  # of the budgets of a pool: with less free memory, copies that are nice to have are unloaded


class PlanningRound:
    """The state of one round, in which each order changes what the next rule sees.

    Args:
        workers: all live workers.
        versions: the versions that serve.
        ordered: the orders of earlier rounds, with their instants.
        now: the current instant.
    """

    def __init__(
        self,
        workers: Sequence[WorkerView],
        versions: Sequence[ServedVersion],
        ordered: Sequence[tuple[float, PlannedOrder]],
        now: float,
    ) -> None:
        self.now = now
        self.versions = sorted(versions, key=lambda version: version.content_id)
        self.draining = sorted((one for one in workers if one.draining), key=lambda worker: worker.id)
        self.orders: list[PlannedOrder] = []
        self._versions = {version.content_id: version for version in self.versions}
        self._workers = {worker.id: worker for worker in sorted(workers, key=lambda worker: worker.id)}
        self._ordered_at = {order.content_id: at for at, order in ordered}  # the last one counts
        self._waiting = [order for at, order in ordered if now - at < ORDER_LIFE_S]
        self._asked = {(order.worker, order.content_id) for order in self._waiting}
        self._holders: defaultdict[str, list[Holder]] = defaultdict(list)  # of workers that go on
        self._victims: set[str] = set()  # content ids that workers unload for the orders of this round
        self._loads: Counter[str] = Counter()  # worker -> loads in progress
        self._count_holders()
        self._rooms: dict[str, tuple[WorkerView, Room]] = {}  # worker -> its room, of the view that it was made from
        self._utilisations = self._count_utilisations()
        #: As published, without the orders: which holder is the busiest does not change from round to round with them.
        self._published_utilisations = dict(self._utilisations)
        self._fleets = self._make_fleets()
        self._count_waiting_loads()

    @property
    def is_full(self) -> bool:
        """Whether the round has as many orders as it may have."""
        return len(self.orders) >= ORDERS_MAX

    def version(self, content_id: str) -> ServedVersion | None:
        return self._versions.get(content_id)

    def holders(self, version: ServedVersion) -> Sequence[Holder]:
        """Return the workers that have a version and go on, or will have it when the orders are carried out."""
        return self._holders.get(version.content_id, ())

    def is_ready(self, version: ServedVersion) -> bool:
        """Whether a worker that goes on can run the version now."""
        return any(instance.loaded_at < math.inf for _, instance in self.holders(version))

    def pool_of(self, worker: str) -> str:
        return self._workers[worker].pool

    def load_s(self, version: ServedVersion) -> float:
        """Return the seconds that a load takes, in the first pool that may serve the version."""
        for pool in version.pools:
            if pool in version.footprints:
                return version.footprints[pool].load_s
        return 0.0

    def soon(self, version: ServedVersion) -> float:
        """Return the probability that the version is called soon."""
        return version.usage.next_use_probability(max(0.0, self.now - version.last_used), SOON_S)

    def was_ordered(self, content_id: str) -> bool:
        """Whether an earlier round, not long ago, or this one ordered something for a version."""
        return content_id in self._ordered_at

    def was_asked(self, worker: str, content_id: str) -> bool:
        """Whether a worker has an order for a version that it may not have carried out yet."""
        return (worker, content_id) in self._asked

    def is_short(self, holders: Sequence[Holder]) -> bool:
        """Whether memory is short in a pool of one of these workers."""
        return any(self._free_shares[self.pool_of(worker)] < SHORT_SHARE for worker, _ in holders)

    def is_plentiful(self, holders: Sequence[Holder]) -> bool:
        """Whether every pool of these workers has memory to spare."""
        return all(self._free_shares[self.pool_of(worker)] >= SPARE_SHARE for worker, _ in holders)

    @cached_property
    def busy(self) -> list[ServedVersion]:
        """The versions that take time of workers, the one that takes most first."""
        return sorted(
            (version for version in self.versions if version.calls_per_s * version.run_s > 0),
            key=lambda version: (-version.calls_per_s * version.run_s, version.content_id),
        )

    def utilisation(self, worker: str) -> float:
        """Return the share of the time in which a worker is busy, if each version's calls are spread evenly."""
        return self._published_utilisations.get(worker, 0.0)

    def busiest(self) -> list[tuple[str, float]]:
        """Return the workers with their utilisation, the busiest first."""
        return sorted(self._utilisations.items(), key=lambda item: (-item[1], item[0]))

    def shares(self, worker: str) -> list[tuple[ServedVersion, float]]:
        """Return the versions in a worker with the share of its time that each takes, the largest first."""
        return [
            (version, version.calls_per_s * version.run_s / len(self.holders(version)))
            for version in self.busy
            if any(holder == worker for holder, _ in self.holders(version))
        ]

    def load(
        self,
        version: ServedVersion,
        reason: OrderReason,
        why: str,
        *,
        price_max_s: float = math.inf,
        free_only: bool = False,
        utilisation_max: float = math.inf,
    ) -> bool:
        """Order the best worker of the first pool that can to load a version; return whether one could.

        Args:
            version: the version, which the worker does not have yet.
            reason: for metrics.
            why: for people.
            price_max_s: what the unloads for it, and waiting for other loads, may cost.
            free_only: whether it must leave SPARE_SHARE of the worker's budget free.
            utilisation_max: share of the time in which the worker may be busy.
        """
        if self.is_full or version.content_id in self._victims:
            return False  # what is unloaded in a round is not loaded elsewhere in the same round
        exclude = {worker for worker, loads in self._loads.items() if loads >= WORKER_LOADS_MAX}
        exclude |= {worker for worker, _ in self.holders(version)}
        exclude |= {worker for worker, content_id in self._asked if content_id == version.content_id}
        if utilisation_max < math.inf:
            exclude |= {worker for worker in self._workers if self._utilisations.get(worker, 0.0) > utilisation_max}
        for pool in version.pools:
            chosen = self._choose(pool, version, exclude, price_max_s, free_only)
            if chosen:
                worker, need = chosen
                evict = price_max_s > 0 and not free_only
                self._order(PlannedOrder("load", worker, version.content_id, reason, why, evict))
                self._count_load(worker, version, need)
                return True
        return False

    def unload(self, worker: str, version: ServedVersion, reason: OrderReason, why: str) -> None:
        """Order a worker to unload a version that is neither in use nor pinned."""
        if self.was_asked(worker, version.content_id) or self.is_full:
            return
        self._order(PlannedOrder("unload", worker, version.content_id, reason, why))
        self._victims.add(version.content_id)
        self._forget_holder(worker, version.content_id)

    def unload_busiest(self, holders: Sequence[Holder], version: ServedVersion, why: str, number: int = 1) -> None:
        """Order the busiest holders to unload a version as surplus; where it is in use, a later round does it.

        Not other holders instead: the next round would move it back.
        """
        loaded = [one for one in holders if one[1].loaded_at < math.inf and not one[1].pinned]
        loaded.sort(key=lambda one: (-self.utilisation(one[0]), one[0]))
        for worker, instance in loaded[:number]:
            if evictable(instance):
                self.unload(worker, version, OrderReason.SURPLUS, why)

    def must_stay(self, worker: str, version: ServedVersion) -> bool:
        """Whether a version may not be unloaded in a worker, or is not ready there."""
        instance = self._fleets[self.pool_of(worker)][worker].instances.get(version.content_id)
        return instance is None or instance.pinned or instance.loaded_at == math.inf

    def _choose(
        self, pool: str, version: ServedVersion, exclude: set[str], price_max_s: float, free_only: bool
    ) -> tuple[str, Footprint] | None:
        """Return the best worker of a pool that can load a version, and what its load takes there; None: none can."""
        fleet, need = self._fleets.get(pool), version.footprints.get(pool)
        if fleet is None or need is None:
            return None
        held = sum(self.pool_of(worker) == pool for worker, _ in self.holders(version))
        if version.instances_max and held >= version.instances_max:
            return None
        if free_only and need.load_bytes > self._most_spare_bytes[pool]:
            return None
        offers = fleet.offers(version.content_id, need, self.now, limit=1, exclude=exclude)
        if isinstance(offers, Refusal) and price_max_s == math.inf:
            tried = self._tried_in(fleet, version, exclude)
            if tried is not None:
                offers = fleet.offers(version.content_id, tried, self.now, limit=1, exclude=exclude)
        if isinstance(offers, Refusal):
            return None
        worker, price = offers[0]
        view = fleet[worker]
        if price > (0.0 if free_only else price_max_s):
            return None
        return None if free_only and not _leaves_spare(view, need) else (worker, self._need(view, version))

    def _tried_in(self, fleet: Fleet, version: ServedVersion, exclude: Collection[str]) -> Footprint | None:
        """Return the most memory of a worker with which a load of an unmeasured version is tried; None: there is none.

        Predictions are high. At a call, a worker tries the version with the memory that other instances leave; without
        this, only versions that were called before would have their `instances_min`.
        """
        best: Footprint | None = None
        for worker in fleet.ids():
            view = fleet[worker]
            if worker in exclude or view.draining or view.pool not in version.unmeasured:
                continue
            need = self._need(view, version)
            host, device = self._room(view).attainable_bytes()
            fits = need.load_bytes <= host and need.device_load_bytes <= device
            if fits and (best is None or need.load_bytes > best.load_bytes):
                best = need
        return best

    def _need(self, view: WorkerView, version: ServedVersion) -> Footprint:
        """Return what a load takes in a worker; a prediction is limited as the worker limits it."""
        need, unmeasured = version.footprints[view.pool], version.unmeasured.get(view.pool)
        if unmeasured is None or view.has_room(need):
            return need
        file_bytes, too_little = unmeasured
        room = self._room(view)
        limited = expected(need, too_little, file_bytes, *room.models_bytes())
        return expected(limited, too_little, file_bytes, *room.attainable_bytes())

    def _room(self, view: WorkerView) -> Room:
        known = self._rooms.get(view.id)
        if known is None or known[0] is not view:
            known = self._rooms[view.id] = view, Room.of(view)
        return known[1]

    def _order(self, order: PlannedOrder) -> None:
        self.orders.append(order)
        self._asked.add((order.worker, order.content_id))
        self._ordered_at[order.content_id] = self.now

    def _count_load(self, worker: str, version: ServedVersion, need: Footprint) -> None:
        """Let an ordered load count: its memory, its worker's loads, and its share of the calls."""
        for victim in self._fleets[self.pool_of(worker)].order(worker, version.content_id, need, self.now):
            self._forget_holder(worker, victim)
            self._victims.add(victim)
        self._holders[version.content_id].append(
            (worker, PlacedInstance(version.content_id, need, math.inf, self.now, in_use=True))
        )
        self._loads[worker] += 1
        self._share_out(version, self._holders[version.content_id][:-1])

    def _forget_holder(self, worker: str, content_id: str) -> None:
        before = self._holders[content_id]
        self._holders[content_id] = [one for one in before if one[0] != worker]
        if content_id in self._versions:
            self._share_out(self._versions[content_id], before)
        if not self._must_stay(content_id):
            return
        for holder, _ in self._holders[content_id]:  # the others are needed from now on
            fleet = self._fleets[self.pool_of(holder)]
            fleet.update(self._with_protected(fleet[holder]))

    def _share_out(self, version: ServedVersion, before: Sequence[Holder]) -> None:
        """Share a version's calls among its holders, which were others before."""
        load, after = version.calls_per_s * version.run_s, self.holders(version)
        for sign, holders in ((-1.0, before), (1.0, after)):
            for worker, _ in holders:
                self._utilisations[worker] += sign * load / len(holders)

    def _count_holders(self) -> None:
        for worker in self._workers.values():
            if worker.draining:
                continue
            for content_id, instance in worker.instances.items():
                self._holders[content_id].append((worker.id, instance))
                if instance.loaded_at == math.inf:
                    self._loads[worker.id] += 1

    def _make_fleets(self) -> dict[str, Fleet]:
        fleets: defaultdict[str, Fleet] = defaultdict(Fleet)
        for worker in self._workers.values():
            fleets[worker.pool].update(self._with_protected(worker))
        return dict(fleets)

    def _with_protected(self, worker: WorkerView) -> WorkerView:
        """Return a worker in which what must stay is marked as pinned."""
        protected = {
            content_id: replace(instance, pinned=True)
            for content_id, instance in worker.instances.items()
            if not instance.pinned and self._must_stay(content_id)
        }
        return replace(worker, instances={**worker.instances, **protected}) if protected else worker

    def _must_stay(self, content_id: str) -> bool:
        version = self._versions.get(content_id)
        return version is not None and (version.pin or len(self.holders(version)) <= version.instances_min > 0)

    def _count_waiting_loads(self) -> None:
        """Let orders count that no worker shows yet: it has not read them, or has not published since."""
        for order in self._waiting:
            worker, version = self._workers.get(order.worker), self._versions.get(order.content_id)
            if worker is None or version is None or worker.draining:
                continue
            if order.do == "unload":
                self._forget_holder(worker.id, order.content_id)
            elif order.content_id not in worker.instances and worker.pool in version.footprints:
                need = self._need(self._fleets[worker.pool][worker.id], version)
                self._count_load(worker.id, version, need)

    def _count_utilisations(self) -> dict[str, float]:
        utilisations = {worker.id: 0.0 for worker in self._workers.values() if not worker.draining}
        for version in self.busy:
            holders = self.holders(version)
            for worker, _ in holders:
                utilisations[worker] += version.calls_per_s * version.run_s / len(holders)
        return utilisations

    @cached_property
    def _most_spare_bytes(self) -> Mapping[str, float]:
        """Pool -> bytes beyond SPARE_SHARE of its budget that the worker with most of them had free at the start."""
        spare = dict.fromkeys((worker.pool for worker in self._workers.values()), -math.inf)
        for worker in self._workers.values():
            if not worker.draining:
                free_bytes = worker.free_bytes - SPARE_SHARE * worker.budget_bytes
                spare[worker.pool] = max(spare[worker.pool], free_bytes)
        return spare

    @cached_property
    def _free_shares(self) -> Mapping[str, float]:
        """Pool -> share of its workers' budgets that is free, of the memory that is shorter; 1 without a budget."""
        free, budget = Counter[str](), Counter[str]()
        for worker in self._workers.values():
            if not worker.draining:
                free[worker.pool] += min(worker.free_bytes, worker.budget_bytes)
                budget[worker.pool] += worker.budget_bytes
                of_device = f"{worker.pool} device"  # no pool is named so
                free[of_device] += min(worker.device_free_bytes, worker.device_budget_bytes)
                budget[of_device] += worker.device_budget_bytes
        return {
            worker.pool: min(
                free[key] / budget[key] if budget[key] else 1.0 for key in (worker.pool, f"{worker.pool} device")
            )
            for worker in self._workers.values()
        }


def _leaves_spare(worker: WorkerView, need: Footprint) -> bool:
    """Return whether SPARE_SHARE of the budgets of a worker stays free beside a load."""
    return (
        worker.free_bytes - need.load_bytes >= SPARE_SHARE * worker.budget_bytes
        and worker.device_free_bytes - need.device_load_bytes >= SPARE_SHARE * worker.device_budget_bytes
    )
