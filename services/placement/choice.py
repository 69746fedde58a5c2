"""Chooses the worker that loads a version. Pure.

workers, what the version takes ─> choose_workers ─> workers in order of preference, or why none can load it
The order is the same in every gateway that sees the same workers, so that gateways seldom ask different workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.services.placement.fleet import Fleet, rendezvous
from millstream.services.placement.views import Footprint, Refusal, WorkerView

__all__ = ["choose_workers", "rendezvous"]


def choose_workers(workers: Sequence[WorkerView], content_id: str, need: Footprint, now: float) -> list[str] | Refusal:
    """Return the ids of the workers that can load a version, best first.

    Best is the least price in seconds: loads that the worker has begun, and what the instances that it would unload
    cost (placement.eviction). Workers with about the same price come in an order of the version's own (rendezvous
    hashing), which sends a version back to the worker that had it before and spreads versions over workers.

    A caller that chooses often keeps a Fleet: to quote a price for each worker costs far more than to choose.
    """
    fleet = Fleet()
    for worker in workers:
        fleet.update(worker)
    return fleet.choose(content_id, need, now, limit=len(workers))
