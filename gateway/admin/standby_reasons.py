"""Why no worker has loaded a version that is on standby, for those who pushed or look at it.

version on standby, workers' records ─> a worker's refusal; else the quota of its owner that is used; else the memory
that is short; else nothing: none was asked
fewer instances ready than the endpoint's `instances_min` ─> why
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from millstream.gateway.admin.schemas_models import Version
from millstream.gateway.catalog.quotas import FootprintOf, Quotas
from millstream.gateway.catalog.snapshot import Snapshot, VersionView
from millstream.gateway.http.deps import Deps
from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint
from millstream.services.sizes import sizes
from millstream.services.wire.records import State, WorkerRecord

_READY_SOON = frozenset({State.LOADING, State.WARMING, State.READY})


def why_missing(
    view: VersionView,
    wanted: int,
    workers: Sequence[WorkerRecord],
    refused: Sequence[str],
    load: Footprint | None,
    *,
    leads: bool,
) -> str | None:
    """Return what keeps instances of an endpoint's active version from being ready; None if as many as wanted are.

    Args:
        view: the version.
        wanted: the endpoint's `instances_min`.
        workers: all live workers.
        refused: why workers do not load it.
        load: what a load takes; None: unknown.
        leads: whether a controller leads.
    """
    instances, pools = [replica.instance for replica in view.replicas], view.pools
    ready = sum(one.state is State.READY for one in instances)
    if ready >= wanted:
        return None
    able = [worker for worker in workers if worker.pool in pools and not worker.draining]
    failed = [one.reason for one in instances if one.state is State.FAILED and one.reason]
    rooms = [worker.room_bytes for worker in able if worker.budget_bytes]
    have = f"its pools {' and '.join(pools)} have"
    why = "the controller waits until a worker has free memory, or may unload what is not called"
    if not able:
        why = f"{have} no worker"
    elif not leads:
        why = "no controller leads, and calls load one only"
    elif sum(one.state in _READY_SOON for one in instances) >= wanted:
        why = "the others are being loaded"
    elif failed:
        why = f"a load failed: {failed[0]}"
    elif len(able) < wanted:
        why = f"{have} {len(able)} worker{'s' if len(able) > 1 else ''}"
    elif refused:
        why = refused[0]
    elif load is not None and len(rooms) == len(able) and load.load_bytes > max(rooms):
        kind = "takes" if load.measured else "is predicted to take"
        takes, room = sizes(load.load_bytes, max(rooms))
        why = f"a load {kind} {takes}, and the largest worker has {room} for models"
    return f"{ready} of {wanted} instances are ready: {why}"


async def add_standby_reasons(deps: Deps, documents: Iterable[Version]) -> None:
    """Set the reasons of the documents whose versions are on standby."""
    waiting = [document for document in documents if document.state is State.STANDBY]
    if not waiting:
        return
    try:
        now = await deps.cluster_state.now()
    except Failure:  # without Redis, by this machine's clock
        now = time.time()  # noqa: TID251 - for people
    snapshot, quotas = deps.catalog.snapshot, Quotas(deps.gate, deps.catalog, deps.repository)
    for document in waiting:
        document.reason = await asyncio.to_thread(_reason, document, snapshot, deps.footprint, quotas, now)


def _reason(document: Version, snapshot: Snapshot, footprint_of: FootprintOf, quotas: Quotas, now: float) -> str | None:
    """Return the reason. Blocking: reads files."""
    model = snapshot.models.get(document.model)
    view = None if model is None or document.version is None else model.versions.get(document.version)
    if model is None or view is None:
        return None
    workers = [worker for worker in snapshot.workers if worker.pool in view.pools and not worker.draining]
    refused = (
        f"worker {worker.id} does not load it: {one.reason}"
        for worker in workers
        for one in worker.refusals
        if one.content_id == view.manifest.content_id and one.until > now
    )
    needs = (footprint_of(view.manifest, worker) for worker in workers)
    over_quota = (quotas.lacking(model.placement.owner, need) for need in needs)
    return next(refused, None) or next(over_quota, None) or _short_of_memory(view.manifest, workers, footprint_of)


def _short_of_memory(manifest: Manifest, workers: Sequence[WorkerRecord], footprint_of: FootprintOf) -> str | None:
    """Return what the version takes and what is free, by the worker with the most; None if one has room."""
    short: list[tuple[int, str]] = []
    for worker in workers:
        need = footprint_of(manifest, worker)
        about = "" if need.measured else "about "
        lacking = None
        for takes, budget, used, memory in (
            (need.device_load_bytes, worker.device_budget_bytes, worker.device_used_bytes, "device memory"),
            (need.load_bytes, worker.budget_bytes, worker.used_bytes, "memory"),
        ):
            free = max(0, budget - used)
            if budget and takes > free:
                need_text, free_text, budget_text = sizes(takes, free, budget)
                text = f"it takes {about}{need_text} of {memory}, and {free_text} of {budget_text} are free"
                lacking = takes - free, text
        if lacking is None:
            return None
        short.append(lacking)
    return min(short)[1] if short else None
