"""standby_reasons: why no worker has loaded a version that is on standby, for those who pushed or look at it.

version on standby, workers' records ─> a worker's refusal; else the quota of its owner that is used; else the memory
that is short; else nothing: none was asked
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from millstream.gateway.admin.schemas_models import Version
from millstream.gateway.catalog.quotas import FootprintOf, Quotas
from millstream.gateway.catalog.snapshot import Snapshot
from millstream.gateway.http.deps import Deps
from millstream.services.errors import Failure
from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint
from millstream.services.sizes import sizes
from millstream.services.wire.records import State, WorkerRecord


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
        found = _lacking(worker, need)
        if found is None:
            return None
        short.append(found)
    return min(short)[1] if short else None


def _lacking(worker: WorkerRecord, need: Footprint) -> tuple[int, str] | None:
    """Return how many bytes a worker lacks, and the two numbers; None if the version fits."""
    about = "" if need.measured else "about "
    for takes, budget, used, memory in (
        (need.load_bytes, worker.budget_bytes, worker.used_bytes, "memory"),
        (need.device_load_bytes, worker.device_budget_bytes, worker.device_used_bytes, "device memory"),
    ):
        free = max(0, budget - used)
        if budget and takes > free:
            need_text, free_text, budget_text = sizes(takes, free, budget)
            return takes - free, f"it takes {about}{need_text} of {memory}, and {free_text} of {budget_text} are free"
    return None
