"""Chooses what a worker unloads to make room for another version. Pure.

A worker's instances, bytes needed ─> make_room ─> content ids to unload, cheapest first, or a Refusal

The cost of unloading an instance is what it takes to have it back, (seconds to load) x (probability that it is called
soon), per byte that it frees: GreedyDual-Size with a measured cost (Cao and Irani, USITS 1997) and a predicted use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView

#: "Soon". Longer, and models that are called every minute and every ten minutes would cost the same: with 600 s the
#: simulation had twice the cold calls (docs/multi-model.md).
HORIZON_S = 60.0
#: An instance stays for this multiple of its load time, so that two models do not take turns in the same memory.
RESIDENCE_LOADS = 10.0
LOAD_S_MIN = 0.01  # so that the cost of an instance without a measured load is not 0
RETRY_S_MIN = 0.1


def make_room(
    worker: WorkerView, need: Footprint, now: float, protected: frozenset[str] = frozenset()
) -> tuple[str, ...] | Refusal:
    """Return the instances to unload until `need` fits; empty if it fits now.

    Args:
        worker: the worker that is to hold the version.
        need: what the version takes.
        now: the current instant.
        protected: content ids that must stay (`instances_min`).
    """
    missing = need.load_bytes - worker.free_bytes
    if missing <= 0:
        return ()
    room = Room.of(worker, now, protected)
    if room.settled_bytes < missing:
        return room.refusal(need)
    victims: list[PlacedInstance] = []
    for one in sorted(room.settled, key=lambda one: (cost_per_byte(one, now), one.content_id)):
        if missing <= 0:
            break
        victims.append(one)
        missing -= one.footprint.resident_bytes
    # The last victims may free so much that some of the earlier ones can stay: the most costly of them do.
    for one in reversed(victims[:-1]):
        if one.footprint.resident_bytes <= -missing:
            victims.remove(one)
            missing += one.footprint.resident_bytes
    return tuple(one.content_id for one in victims)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of one worker that a version could have, and what stands in the way of more.

    Args:
        pool: the worker's pool, for messages.
        free_bytes: free now.
        settled: instances that may be unloaded now.
        settled_bytes: what they take.
        evictable_bytes: what all instances take that may be unloaded now or once they have been there long enough.
        models_bytes: the budget without what the process takes for itself.
        settles_in_s: time until the next instance may be unloaded; 0 if none waits for that.
    """

    pool: str
    free_bytes: int
    settled: tuple[PlacedInstance, ...]
    settled_bytes: int
    evictable_bytes: int
    models_bytes: int
    settles_in_s: float

    @staticmethod
    def of(worker: WorkerView, now: float, protected: frozenset[str] = frozenset()) -> Room:
        """Return the room in a worker, in which the content ids `protected` must stay."""
        held_bytes = settled_bytes = evictable_bytes = 0
        settles_in_s = float("inf")
        settled = []
        for one in worker.instances.values():
            resident_bytes = one.footprint.resident_bytes
            held_bytes += resident_bytes
            if not evictable(one) or one.content_id in protected:
                continue
            evictable_bytes += resident_bytes
            wait_s = RESIDENCE_LOADS * one.footprint.load_s - (now - one.loaded_at)
            if wait_s <= 0:
                settled.append(one)
                settled_bytes += resident_bytes
            elif wait_s < settles_in_s:
                settles_in_s = wait_s
        return Room(
            worker.pool,
            worker.free_bytes,
            tuple(settled),
            settled_bytes,
            evictable_bytes,
            max(0, worker.budget_bytes - max(0, worker.used_bytes - held_bytes)),
            settles_in_s if settles_in_s < float("inf") else 0.0,
        )

    def refusal(self, need: Footprint) -> Refusal:
        """Return why `need` does not fit, for a need that settled instances do not make room for."""
        if need.load_bytes > self.models_bytes:
            return Refusal(
                RefusalKind.TOO_LARGE,
                f"it takes {need.load_bytes} bytes, and a worker of pool {self.pool} has {self.models_bytes} "
                "for models",
            )
        if self.evictable_bytes >= need.load_bytes - self.free_bytes:
            return Refusal(
                RefusalKind.THRASHING,
                "the models that could be unloaded for it were loaded a moment ago",
                max(RETRY_S_MIN, self.settles_in_s),
            )
        return Refusal(
            RefusalKind.NOTHING_EVICTABLE,
            f"it takes {need.load_bytes} bytes, {self.free_bytes} are free, and all other models are in use or pinned",
            1.0,
        )


def credit_largest_peak(instances: dict[str, PlacedInstance]) -> None:
    """Add to what the instance with the largest peak frees the part of the peak that is only its own.

    A worker counts the largest peak of its instances as used: it goes with its instance, down to the next largest.
    """
    largest = sorted(instances.values(), key=lambda one: one.footprint.peak_bytes)[-2:]
    if not largest:
        return
    one, next_peak = largest[-1], largest[0].footprint.peak_bytes if len(largest) > 1 else 0
    freed = one.footprint.resident_bytes + one.footprint.peak_bytes - next_peak
    instances[one.content_id] = replace(one, footprint=replace(one.footprint, resident_bytes=freed))


def evictable(one: PlacedInstance) -> bool:
    """Whether an instance may be unloaded at some time: never while it loads, is in use, or is pinned."""
    return not (one.in_use or one.pinned) and one.loaded_at < float("inf")


def is_settled(one: PlacedInstance, now: float) -> bool:
    """Whether an instance has been there long enough for its load to have been worth it."""
    return now - one.loaded_at >= RESIDENCE_LOADS * one.footprint.load_s


def cost_per_byte(one: PlacedInstance, now: float) -> float:
    """Return what unloading an instance costs, in expected seconds of loading per byte."""
    idle_s = max(0.0, now - one.last_used)
    soon = one.usage.next_use_probability(idle_s, HORIZON_S)
    return max(one.footprint.load_s, LOAD_S_MIN) * soon / max(1, one.footprint.resident_bytes)


def cost_of(instances: Iterable[PlacedInstance], now: float) -> float:
    """Return what unloading instances costs, in expected seconds of loading."""
    return sum(cost_per_byte(one, now) * one.footprint.resident_bytes for one in instances)
