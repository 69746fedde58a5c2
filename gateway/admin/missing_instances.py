"""Says why fewer instances of a version are ready than its endpoint's `instances_min`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millstream.gateway.catalog.snapshot import VersionView
from millstream.services.placement.views import Footprint
from millstream.services.sizes import sizes
from millstream.services.wire.records import State, WorkerRecord

_READY_SOON = frozenset({State.LOADING, State.WARMING, State.READY})


class WantedInstances(NamedTuple):
    """The active version of an endpoint, and what is known about its instances.

    Args:
        view: the version.
        wanted: the endpoint's `instances_min`.
        workers: all live workers.
        refused: why workers do not load it.
        load: what a load takes; None: unknown.
        leads: whether a controller leads.
    """

    view: VersionView
    wanted: int
    workers: Sequence[WorkerRecord]
    refused: Sequence[str]
    load: Footprint | None
    leads: bool


def why_missing(at: WantedInstances) -> str | None:
    """Return what keeps instances from being ready; None if as many as wanted are."""
    ready = sum(replica.instance.state is State.READY for replica in at.view.replicas)
    return None if ready >= at.wanted else f"{ready} of {at.wanted} instances are ready: {_why(at)}"


def _why(at: WantedInstances) -> str:
    instances, pools = [replica.instance for replica in at.view.replicas], at.view.pools
    able = [worker for worker in at.workers if worker.pool in pools and not worker.draining]
    failed = [one.reason for one in instances if one.state is State.FAILED and one.reason]
    have = f"its pools {' and '.join(pools)} have"
    if not able:
        return f"{have} no worker"
    if not at.leads:
        return "no controller leads, and calls load one only"
    if sum(one.state in _READY_SOON for one in instances) >= at.wanted:
        return "the others are being loaded"
    if failed:
        return f"a load failed: {failed[0]}"
    if len(able) < at.wanted:
        return f"{have} {len(able)} worker{'s' if len(able) > 1 else ''}"
    if at.refused:
        return at.refused[0]
    rooms = [worker.room_bytes for worker in able if worker.budget_bytes]
    if at.load is not None and len(rooms) == len(able) and at.load.load_bytes > max(rooms):
        kind = "takes" if at.load.measured else "is predicted to take"
        load, room = sizes(at.load.load_bytes, max(rooms))
        return f"a load {kind} {load}, and the largest worker has {room} for models"
    return "the controller waits until a worker has free memory, or may unload what is not called"
