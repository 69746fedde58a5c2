"""The room in a worker, free or to be freed by unloading, and which instances make it: those that cost least. Pure.

WorkerView ─> Room.of ─> a Space for each kind of memory
bytes needed ─> make_room ─> content ids to unload, cheapest first, or a Refusal

A worker counts the resident bytes of its instances and the largest peak of them, because one batch runs at a time; a
load in progress counts with its resident and peak bytes. So victims free their resident bytes, and of the largest peak
what it is larger than the largest of the instances that stay.
The cost of unloading an instance is what it takes to have it back, (seconds to load) x (probability that it is called
soon), per byte that it frees: GreedyDual-Size with a measured cost (Cao and Irani, USITS 1997) and a predicted use.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millstream.services.placement.views import (
    UNLIMITED_BYTES,
    Footprint,
    PlacedInstance,
    Refusal,
    RefusalKind,
    WorkerView,
)
from millstream.services.sizes import sizes

#: "Soon", twice: the first tells models apart that are called every few seconds, the second those that are called every
#: minute and every ten minutes (docs/multi-model.md).
HORIZONS_S = (10.0, 120.0)
#: A call that is more likely than this counts as certain. Where models are called in turn that do not fit together, the
#: one that was called longest ago is the next one, and the most certain to be called by a little: then always the same
#: few make room for each other, and the others stay.
CERTAIN = 0.9
LOAD_S_MIN = 0.01  # so that the cost of an instance without a measured load is not 0


def make_room(
    worker: WorkerView, need: Footprint, now: float, protected: frozenset[str] = frozenset()
) -> tuple[str, ...] | Refusal:
    """Return the instances to unload until `need` fits; empty if it fits now, or once what is on its way out is gone.

    Where any set of evictable instances makes room, one is found: unloading more never frees less.

    Args:
        worker: the worker that is to hold the version.
        need: what the version takes.
        now: the current instant.
        protected: content ids that must stay (`instances_min`).
    """
    if worker.has_room(need):
        return ()
    room = Room.of(worker, protected)
    short = room.short(need)
    if not short:
        return ()
    if any(space.evictable_bytes < missing for space, missing in short):
        return room.refusal(need)
    costs = [cost(one, now) for one in room.evictable]
    victims: list[str] = []
    # From all evictable instances, those stay that are not needed: the most costly are asked first.
    spared = [space.evictable_bytes - missing for space, missing in short]
    peaks = [space.kept_peak for space, _ in short]
    for at in reversed(room.cheapest_first(costs)):
        kept = [space.kept(at, peak) for (space, _), peak in zip(short, peaks, strict=True)]
        left = [spare - took for spare, (took, _) in zip(spared, kept, strict=True)]
        if min(left) < 0:
            victims.append(room.evictable[at].content_id)
        else:
            spared, peaks = left, [peak for _, peak in kept]
    return tuple(reversed(victims))


def evictable(one: PlacedInstance) -> bool:
    """Whether an instance may be unloaded at some time: never while it loads, is in use, or is pinned."""
    return not (one.in_use or one.pinned) and one.loaded_at < float("inf")


def cost(one: PlacedInstance, now: float) -> float:
    """Return what unloading an instance costs, in expected seconds of loading."""
    idle_s = max(0.0, now - one.last_used)
    soon = (min(CERTAIN, one.usage.next_use_probability(idle_s, horizon_s)) for horizon_s in HORIZONS_S)
    return max(one.footprint.load_s, LOAD_S_MIN) * sum(soon)


def cost_of(instances: Iterable[PlacedInstance], now: float) -> float:
    """Return what unloading instances costs, in expected seconds of loading."""
    return sum(cost(one, now) for one in instances)


OTHERS_BUSY_RETRY_S = 1.0


class Space(NamedTuple):
    """One kind of memory of a worker, and what its instances take of it.

    Args:
        of_device: whether it is the memory of an accelerator.
        budget_bytes: 0: no limit.
        free_bytes: free now, or free soon because it is on its way out.
        models_bytes: the budget without what the process takes for itself.
        resident: resident bytes of the evictable instances, in the order of `Room.evictable`.
        peaks: peak bytes of these.
        largest_peak: of all instances.
        second_peak: of all instances but one with the largest.
        kept_peak: the largest of the instances that are not evictable.
        evictable_bytes: what unloading all evictable instances frees.
        loading_bytes: what is reserved for loads in progress.
    """

    of_device: bool
    budget_bytes: int
    free_bytes: int
    models_bytes: int
    resident: Sequence[int]
    peaks: Sequence[int]
    largest_peak: int
    second_peak: int
    kept_peak: int
    evictable_bytes: int
    loading_bytes: int

    def missing_bytes(self, need: Footprint) -> int:
        return self.needed_bytes(need) - self.free_bytes

    def needed_bytes(self, need: Footprint) -> int:
        return need.device_load_bytes if self.of_device else need.load_bytes

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "device memory" if self.of_device else "memory"

    def freed_alone(self) -> list[int]:
        """Return what unloading each of the evictable instances alone frees."""
        if self.largest_peak == self.second_peak:
            return list(self.resident)
        second = self.second_peak
        return [
            resident + peak - second if peak > second else resident
            for resident, peak in zip(self.resident, self.peaks, strict=True)
        ]

    def kept(self, at: int, staying_peak: int) -> tuple[int, int]:
        """Return the bytes that are not freed if one evictable instance stays, and the largest peak of what stays then.

        Args:
            at: the index of the instance.
            staying_peak: the largest peak of what stays otherwise.
        """
        peak_bytes = self.peaks[at]
        return self.resident[at] + max(0, peak_bytes - staying_peak), max(staying_peak, peak_bytes)

    def freed_in_order(self, order: Sequence[int]) -> list[int]:
        """Return what unloading the first 0, 1, 2, … evictable instances of an order frees."""
        freed, staying = self.evictable_bytes, self.kept_peak
        amounts = [freed]
        for at in reversed(order):
            peak = self.peaks[at]
            freed -= self.resident[at]
            if peak > staying:
                freed -= peak - staying
                staying = peak
            amounts.append(freed)
        amounts.reverse()
        return amounts


class _Groups(NamedTuple):
    """The instances of a worker."""

    evictable: list[PlacedInstance]
    kept: list[PlacedInstance]  # in use, pinned or protected
    loading: list[PlacedInstance]


@dataclass(slots=True)
class Room:
    """The memory of one worker that a version could have, and what stands in the way of more.

    Args:
        pool: the worker's pool, for messages.
        evictable: instances that may be unloaded.
        spaces: the memory of the host, and that of the device if it has a limit.
    """

    pool: str
    evictable: Sequence[PlacedInstance]
    spaces: Sequence[Space]

    @staticmethod
    def of(worker: WorkerView, protected: Collection[str] = ()) -> Room:
        """Return the room in a worker, in which the content ids `protected` must stay."""
        groups = _Groups([], [], [])
        for one in worker.instances.values():
            if one.loaded_at == math.inf:
                groups.loading.append(one)
            elif one.in_use or one.pinned or one.content_id in protected:
                groups.kept.append(one)
            else:
                groups.evictable.append(one)
        spaces = [_space(worker, groups, of_device=False)]
        if worker.device_budget_bytes:
            spaces.append(_space(worker, groups, of_device=True))
        return Room(worker.pool, groups.evictable, spaces)

    def short(self, need: Footprint) -> list[tuple[Space, int]]:
        """Return the spaces in which `need` does not fit now, with the bytes that are missing there."""
        missing = [(space, space.missing_bytes(need)) for space in self.spaces]
        return [one for one in missing if one[1] > 0]

    def attainable_bytes(self) -> tuple[int, int]:
        """Return the bytes of the host and of the device that can be made free, once loads have ended."""
        attainable = [space.free_bytes + space.evictable_bytes + space.loading_bytes for space in self.spaces]
        return attainable[0], attainable[1] if len(attainable) > 1 else UNLIMITED_BYTES

    def models_bytes(self) -> tuple[int, int]:
        """Return the bytes of the host and of the device that all instances together may take."""
        return self.spaces[0].models_bytes, self.spaces[1].models_bytes if len(self.spaces) > 1 else UNLIMITED_BYTES

    def cheapest_first(self, costs: Sequence[float]) -> list[int]:
        """Return the indices of the evictable instances, those with the least cost for their share of memory first."""
        evictable = self.evictable
        ranks = [
            (cost / weight, one.content_id) for cost, weight, one in zip(costs, self._weights(), evictable, strict=True)
        ]
        return sorted(range(len(evictable)), key=ranks.__getitem__)

    def _weights(self) -> Sequence[float]:
        """Return the bytes that unloading each instance frees; with device memory, shares of both budgets."""
        shares = [(space, 1 / space.budget_bytes) for space in self.spaces if space.budget_bytes]
        if len(shares) == 1:
            return [max(1, freed) for freed in shares[0][0].freed_alone()]
        both = [[share * max(1, freed) for freed in space.freed_alone()] for space, share in shares]
        return [sum(weights) for weights in zip(*both, strict=True)] if both else [1.0] * len(self.evictable)

    def refusal(self, need: Footprint) -> Refusal:
        """Return why `need` does not fit, for a need that evictable instances do not make room for."""
        for space in self.spaces:
            if space.needed_bytes(need) > space.models_bytes:
                takes, has = sizes(space.needed_bytes(need), space.models_bytes)
                return Refusal(
                    RefusalKind.TOO_LARGE,
                    f"it takes {takes} of {space.name}, and a worker of pool {self.pool} has {has} for models",
                )
        short = (space for space, missing in self.short(need) if space.evictable_bytes < missing)
        space = next(short, self.spaces[0])
        takes, free = sizes(space.needed_bytes(need), space.free_bytes)
        return Refusal(
            RefusalKind.NOTHING_EVICTABLE,
            f"it takes {takes} of {space.name}, {free} are free, and all other models are in use, pinned or still "
            "loading",
            OTHERS_BUSY_RETRY_S,
        )


def freed_bytes(worker: WorkerView, victims: Collection[str]) -> tuple[int, int]:
    """Return the bytes of the host and of the device that unloading `victims` frees."""
    loaded = [one for one in worker.instances.values() if one.loaded_at < math.inf]
    gone = [one for one in loaded if one.content_id in victims]
    stay = [one for one in loaded if one.content_id not in victims]
    host, device = (
        sum(_resident(gone, of_device)) + max(_peaks(loaded, of_device)) - max(_peaks(stay, of_device))
        for of_device in (False, True)
    )
    return host, device


def _space(worker: WorkerView, groups: _Groups, *, of_device: bool) -> Space:
    evictable, kept, loading = groups
    resident, peaks = _resident(evictable, of_device), _peaks(evictable, of_device)
    resident_bytes, kept_peak = sum(resident), max(_peaks(kept, of_device))
    loading_bytes = sum(_resident(loading, of_device)) + sum(_peaks(loading, of_device))
    largest_peak = max(kept_peak, *peaks)
    held_bytes = resident_bytes + sum(_resident(kept, of_device)) + loading_bytes + largest_peak
    budget_bytes = worker.device_budget_bytes if of_device else worker.budget_bytes
    used_bytes = worker.device_used_bytes if of_device else worker.used_bytes
    leaving_bytes = worker.device_leaving_bytes if of_device else worker.leaving_bytes
    models_bytes = worker.device_room_bytes if of_device else worker.room_bytes
    if not budget_bytes:
        models_bytes = UNLIMITED_BYTES
    elif not models_bytes:
        models_bytes = max(0, budget_bytes - max(0, used_bytes - leaving_bytes - held_bytes))
    return Space(
        of_device,
        budget_bytes,
        max(0, budget_bytes - used_bytes + leaving_bytes) if budget_bytes else UNLIMITED_BYTES,
        models_bytes,
        resident,
        peaks[1:],
        largest_peak,
        max(kept_peak, sorted(peaks)[-2] if evictable else 0),
        kept_peak,
        resident_bytes + largest_peak - kept_peak,
        loading_bytes,
    )


def _resident(instances: Sequence[PlacedInstance], of_device: bool) -> list[int]:
    if of_device:
        return [one.footprint.device_resident_bytes for one in instances]
    return [one.footprint.resident_bytes for one in instances]


def _peaks(instances: Sequence[PlacedInstance], of_device: bool) -> list[int]:
    """Return the peaks of instances, and a 0 before them, so that there is a largest one."""
    if of_device:
        return [0, *[one.footprint.device_peak_bytes for one in instances]]
    return [0, *[one.footprint.peak_bytes for one in instances]]
