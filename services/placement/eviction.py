"""Chooses what a worker unloads to make room for another version. Pure.

A worker's instances, bytes needed ─> make_room ─> content ids to unload, cheapest first, or a Refusal

The cost of unloading an instance is what it takes to have it back, (seconds to load) x (probability that it is called
soon), per byte that it frees: GreedyDual-Size with a measured cost (Cao and Irani, USITS 1997) and a predicted use.
"""

from __future__ import annotations

from collections.abc import Iterable

from millstream.services.placement.room import Room
from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, WorkerView

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
