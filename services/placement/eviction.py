"""Chooses what a worker unloads to make room for another version. Pure.

A worker's instances, bytes needed ─> make_room ─> content ids to unload, cheapest first, or a Refusal

The cost of unloading an instance is what it takes to have it back, (seconds to load) x (probability that it is called
soon), per byte that it frees: GreedyDual-Size with a measured cost (Cao and Irani, USITS 1997) and a predicted use.
"""

from __future__ import annotations

from millstream.services.placement.views import Footprint, PlacedInstance, Refusal, RefusalKind, WorkerView

HORIZON_S = 600.0  # "soon"
#: An instance stays for this multiple of its load time, so that two models do not take turns in the same memory.
RESIDENCE_LOADS = 10.0
LOAD_S_MIN = 0.01  # so that the cost of an instance without a measured load is not 0


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
    candidates = [one for one in worker.instances.values() if evictable(one) and one.content_id not in protected]
    settled = [one for one in candidates if is_settled(one, now)]
    if sum(one.footprint.resident_bytes for one in settled) < missing:
        return _refusal(worker, need, candidates, now)
    victims: list[PlacedInstance] = []
    for one in sorted(settled, key=lambda one: (cost_per_byte(one, now), one.content_id)):
        if missing <= 0:
            break
        victims.append(one)
        missing -= one.footprint.resident_bytes
    # The last victims may free so much that some of the earlier ones can stay: the most costly of them do.
    for one in reversed(victims):
        if one.footprint.resident_bytes <= -missing:
            victims.remove(one)
            missing += one.footprint.resident_bytes
    return tuple(one.content_id for one in victims)


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


def _refusal(worker: WorkerView, need: Footprint, candidates: list[PlacedInstance], now: float) -> Refusal:
    evictable_bytes = sum(one.footprint.resident_bytes for one in candidates)
    fixed = worker.used_bytes - sum(one.footprint.resident_bytes for one in worker.instances.values())
    if need.load_bytes > worker.budget_bytes - max(0, fixed):
        return Refusal(
            RefusalKind.TOO_LARGE,
            f"it takes {need.load_bytes} bytes, and a worker of pool {worker.pool} has "
            f"{max(0, worker.budget_bytes - max(0, fixed))} for models",
        )
    if evictable_bytes >= need.load_bytes - worker.free_bytes:
        waits = [RESIDENCE_LOADS * one.footprint.load_s - (now - one.loaded_at) for one in candidates]
        return Refusal(
            RefusalKind.THRASHING,
            "the models that could be unloaded for it were loaded a moment ago",
            max(0.1, min((wait for wait in waits if wait > 0), default=0.1)),
        )
    return Refusal(
        RefusalKind.NOTHING_EVICTABLE,
        f"it takes {need.load_bytes} bytes, {worker.free_bytes} are free, and all other models are in use or pinned",
        1.0,
    )
