"""Says why fewer instances of a version are ready than its endpoint's `instances_min`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.gateway.catalog.snapshot import VersionView
from millstream.services.placement.views import Footprint
from millstream.services.wire.records import State, WorkerRecord

_BEING_LOADED = frozenset({State.LOADING, State.WARMING})


def why_missing(
    view: VersionView,
    wanted: int,
    workers: Sequence[WorkerRecord],
    refused: Sequence[str],
    load: Footprint | None,
    *,
    leads: bool,
) -> str | None:
    """Return what keeps instances from being ready; None if `wanted` are.

    Args:
        view: the active version of an endpoint.
        wanted: its `instances_min`.
        workers: all live workers.
        refused: why workers do not load it.
        load: what a load takes; None: unknown.
        leads: whether a controller leads.
    """
    states = [at.instance.state for at in view.replicas]
    ready = states.count(State.READY)
    if ready >= wanted:
        return None
    return f"{ready} of {wanted} instances are ready: {_why(view, wanted, workers, refused, load, leads=leads)}"


def _why(
    view: VersionView,
    wanted: int,
    workers: Sequence[WorkerRecord],
    refused: Sequence[str],
    load: Footprint | None,
    *,
    leads: bool,
) -> str:
    able = [worker for worker in workers if worker.pool in view.pools and not worker.draining]
    failed = [at.instance.reason for at in view.replicas if at.instance.state is State.FAILED and at.instance.reason]
    ends = f"its pools {' and '.join(view.pools)} have"
    if not able:
        return f"{ends} no worker"
    if not leads:
        return "no controller leads, and calls load one only"
    if sum(at.instance.state in {*_BEING_LOADED, State.READY} for at in view.replicas) >= wanted:
        return "the others are being loaded"
    if failed:
        return f"a load failed: {failed[0]}"
    if len(able) < wanted:
        return f"{ends} {len(able)} worker{'s' if len(able) > 1 else ''}"
    if refused:
        return refused[0]
    rooms = [worker.room_bytes for worker in able if worker.budget_bytes]
    if load is not None and len(rooms) == len(able) and load.load_bytes > max(rooms):
        kind = "takes" if load.measured else "is predicted to take"
        return f"a load {kind} {load.load_bytes} bytes, and the largest worker has {max(rooms)} for models"
    return "the controller waits until a worker has free memory, or may unload what is not called"
