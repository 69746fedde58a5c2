"""Chooses what a worker unloads to make room for another version. Pure.

A worker's instances, bytes needed ─> make_room ─> content ids to unload, cheapest first, or a Refusal

The cost of unloading an instance is what it takes to have it back, (seconds to load) x (probability that it is called
soon), per byte that it frees: GreedyDual-Size with a measured cost (Cao and Irani, USITS 1997) and a predicted use.
"""

from __future__ import annotations

from collections.abc import Iterable

from millstream.services.placement.room import RESIDENCE_LOADS, Room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, WorkerView

#: "Soon". Longer, and where memory is short, models that are called every minute and every ten minutes would cost the
#: same; shorter, and where it is not, nothing tells those apart that are called every half hour (docs/multi-model.md).
HORIZON_S = 120.0
LOAD_S_MIN = 0.01  # so that the cost of an instance without a measured load is not 0


def make_room(
    worker: WorkerView, need: Footprint, now: float, protected: frozenset[str] = frozenset()
) -> tuple[str, ...] | Refusal:
    """Return the instances to unload until `need` fits; empty if it fits now.

    Where any set of settled instances makes room, one is found: unloading more never frees less.

    Args:
        worker: the worker that is to hold the version.
        need: what the version takes.
        now: the current instant.
        protected: content ids that must stay (`instances_min`).
    """
    if worker.has_room(need):
        return ()
    room = Room.of(worker, now, protected)
    short = room.short(need)
    if any(space.settled_bytes < missing for space, missing in short):
        return room.refusal(need)
    costs = [cost(one, now) for one in room.settled]
    victims: list[str] = []
    # From all settled instances, those stay that are not needed: the most costly are asked first.
    spared = [space.settled_bytes - missing for space, missing in short]
    peaks = [space.kept_peak for space, _ in short]
    for at in reversed(room.cheapest_first(costs)):
        kept = [space.kept(at, peak) for (space, _), peak in zip(short, peaks, strict=True)]
        left = [spare - took for spare, (took, _) in zip(spared, kept, strict=True)]
        if min(left) < 0:
            victims.append(room.settled[at].content_id)
        else:
            spared, peaks = left, [peak for _, peak in kept]
    return tuple(reversed(victims))


def evictable(one: PlacedInstance) -> bool:
    """Whether an instance may be unloaded at some time: never while it loads, is in use, or is pinned."""
    return not (one.in_use or one.pinned) and one.loaded_at < float("inf")


def is_settled(one: PlacedInstance, now: float) -> bool:
    """Whether an instance has been there long enough for its load to have been worth it."""
    return now - one.loaded_at >= RESIDENCE_LOADS * one.footprint.load_s


def cost(one: PlacedInstance, now: float) -> float:
    """Return what unloading an instance costs, in expected seconds of loading."""
    idle_s = max(0.0, now - one.last_used)
    return max(one.footprint.load_s, LOAD_S_MIN) * one.usage.next_use_probability(idle_s, HORIZON_S)


def cost_of(instances: Iterable[PlacedInstance], now: float) -> float:
    """Return what unloading instances costs, in expected seconds of loading."""
    return sum(cost(one, now) for one in instances)
