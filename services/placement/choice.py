"""Chooses the worker that loads a version. Pure.

workers, what the version takes ─> choose_workers ─> workers in order of preference, or why none can load it
The order is the same in every gateway that sees the same workers, so that gateways seldom ask different workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from millstream.services.placement.eviction import cost_per_byte, make_room
from millstream.services.placement.views import Footprint, Refusal, RefusalKind, WorkerView

#: of which the refusal is reported if several workers refuse: the one that an operator or a retry can most likely mend
_BEST_REFUSAL = (
    RefusalKind.THRASHING,
    RefusalKind.NOTHING_EVICTABLE,
    RefusalKind.TOO_LARGE,
    RefusalKind.NO_WORKER,
)


def choose_workers(workers: Sequence[WorkerView], content_id: str, need: Footprint, now: float) -> list[str] | Refusal:
    """Return the ids of the workers that can load a version, best first: free memory before cheap evictions.

    Workers with free memory come in an order of the version's own (rendezvous hashing), which sends a version back to
    the worker that held it before and spreads versions over workers.
    """
    ranked: list[tuple[tuple[float, float, int], str]] = []
    refusals: list[Refusal] = []
    for worker in workers:
        if worker.draining:
            continue
        victims = make_room(worker, need, now)
        if isinstance(victims, Refusal):
            refusals.append(victims)
            continue
        cost = sum(
            cost_per_byte(one, now) * one.footprint.resident_bytes for one in map(worker.instances.__getitem__, victims)
        )
        ranked.append(((1.0 if victims else 0.0, cost, rendezvous(content_id, worker.id)), worker.id))
    if ranked:
        return [worker for _, worker in sorted(ranked)]
    if not refusals:
        return Refusal(RefusalKind.NO_WORKER, "no worker of its pools is running", 1.0)
    return min(refusals, key=lambda refusal: _BEST_REFUSAL.index(refusal.kind))


def rendezvous(content_id: str, worker: str) -> int:
    """Return the rank of a worker for a version; the least comes first. Equal in all processes."""
    slot = worker.rpartition("-")[0] or worker  # without the start of the process: a restarted worker keeps its rank
    return int.from_bytes(blake2b(f"{content_id} {slot}".encode(), digest_size=8).digest())
