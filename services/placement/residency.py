"""Decides which versions a worker loads without any order. Pure.

its instances and memory, what serves in its pool ─> preloads ─> versions to load, in order; the others are on standby

If all these versions fit into the worker's memory together, it holds all of them. If not, it keeps what it has,
loads the pinned ones while memory is free, and fills free memory up to FILL_SHARE in an order of its own. Nothing is
unloaded for a preload.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from millstream.services.placement.fleet import rendezvous
from millstream.services.placement.views import Footprint, WorkerView

#: Preloads fill this share of the memory; the rest is for what is called.
FILL_SHARE = 0.75
#: Versions that are passed over because they do not fit, before the rest of the order is not tried.
PASSED_OVER_MAX = 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version of the worker's pool.

    Args:
        pinned: whether its endpoint forbids to unload it: it comes first.
        waits: whether it is loaded only by an order: it was unloaded on purpose, or other workers hold enough of it.
    """

    content_id: str
    footprint: Footprint
    pinned: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Preloads:
    """What a worker loads without any order, in this order. `whole`: all versions of its pool fit together."""

    whole: bool
    content_ids: tuple[str, ...]


def preloads(
    worker: WorkerView, candidates: Sequence[Candidate], base_bytes: int, device_base_bytes: int = 0
) -> Preloads:
    """Return the versions to load besides those that the worker holds or loads.

    Args:
        worker: its instances include those that are being loaded.
        candidates: all versions of its pool, in the order in which they are loaded if all of them fit.
        base_bytes: what the process takes without any instance.
        device_base_bytes: likewise of the device.
    """
    missing = [one for one in candidates if one.content_id not in worker.instances and not one.waits]
    if fits_together(candidates, worker, base_bytes, device_base_bytes):
        return Preloads(True, tuple(one.content_id for one in missing))
    chosen: list[str] = []
    for one in missing:
        if one.pinned and _fits(worker, one.footprint, 1.0):
            chosen.append(one.content_id)
            worker = _with(worker, one.footprint)
    passed_over = 0
    others = (one for one in missing if not one.pinned)
    for one in sorted(others, key=lambda one: rendezvous(one.content_id, worker.id)):
        if _fits(worker, one.footprint, FILL_SHARE):
            chosen.append(one.content_id)
            worker = _with(worker, one.footprint)
        else:
            passed_over += 1
            if passed_over >= PASSED_OVER_MAX:
                break
    return Preloads(False, tuple(chosen))


def _fits(worker: WorkerView, need: Footprint, share: float) -> bool:
    """Return whether a load leaves the other part of both budgets free."""
    fits = not worker.budget_bytes or worker.used_bytes + need.load_bytes <= share * worker.budget_bytes
    device_bytes = worker.device_budget_bytes
    return fits and (not device_bytes or worker.device_used_bytes + need.device_load_bytes <= share * device_bytes)


def _with(worker: WorkerView, loaded: Footprint) -> WorkerView:
    return replace(
        worker,
        used_bytes=worker.used_bytes + loaded.resident_bytes,
        device_used_bytes=worker.device_used_bytes + loaded.device_resident_bytes,
    )


def fits_together(
    candidates: Collection[Candidate], worker: WorkerView, base_bytes: int, device_base_bytes: int
) -> bool:
    """Return whether instances of all versions fit into the budgets of a worker at the same time."""
    needs = [one.footprint for one in candidates]
    host = sum(one.resident_bytes for one in needs) + max((one.peak_bytes for one in needs), default=0)
    device = sum(one.device_resident_bytes for one in needs)
    device += max((one.device_peak_bytes for one in needs), default=0)
    return (not worker.budget_bytes or base_bytes + host <= worker.budget_bytes) and (
        not worker.device_budget_bytes or device_base_bytes + device <= worker.device_budget_bytes
    )
