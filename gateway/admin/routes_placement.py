"""GET /admin/v1/placement, and PATCH /admin/v1/models/NAME for the settings of its endpoint."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request

from millstream.gateway.access.principal import require
from millstream.gateway.admin import schemas_placement as schemas
from millstream.gateway.admin.upload import known_pools
from millstream.gateway.catalog.quotas import Quotas
from millstream.gateway.catalog.snapshot import visible
from millstream.gateway.http.body import DOCUMENT_BYTES_MAX, read_body
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body
from millstream.gateway.tensors.json_text import parse_json
from millstream.services.access.scopes import Need
from millstream.services.errors import Failure
from millstream.services.model.manifest import EndpointPlacement
from millstream.services.placement.views import Footprint
from millstream.services.process.audit import audit, audited
from millstream.services.process.threads import in_storage_thread
from millstream.services.queue.cluster_state import Leader
from millstream.services.repository import endpoint_changes

router = APIRouter(prefix="/admin/v1")


@router.get(
    "/placement",
    summary="Which worker holds which version, and why",
    description="All workers with their memory, and the versions that serve with those that hold them, a page of "
    "models at a time. A worker lists its instances of the models on the page.",
    responses=documented(400, 404),
)
async def get_placement(
    deps: DepsOf,
    model: Annotated[str | None, Query(description="Only this model.")] = None,
    limit: Annotated[int, Query(ge=1, le=schemas.LIMIT_MAX, description="Most models of a page.")] = 100,
    page_token: Annotated[str | None, Query(description="The `next_page_token` of the last page.")] = None,
) -> schemas.Placement:
    snapshot = visible(deps.catalog.snapshot, Need.READ)
    names, next_page_token = schemas.page_of(snapshot, model, limit, page_token)
    loads = await asyncio.to_thread(schemas.loads_shown, snapshot, names, deps.footprint)
    facts = schemas.ClusterFacts(time.time(), loads)  # noqa: TID251 - without Redis, ages by this machine's clock
    with suppress(Failure):
        facts = await _facts(deps, schemas.lanes_shown(snapshot, names), loads)
    return schemas.placement(snapshot, facts, names, next_page_token)


async def _facts(
    deps: Deps, lanes: Mapping[str, list[str]], loads: Mapping[str, tuple[str, Footprint]]
) -> schemas.ClusterFacts:
    """Return what Redis knows. Raises Failure."""
    state = deps.cluster_state
    now, leader = await state.now(), await state.leader()
    busy: set[tuple[str, str]] = set()
    for pool, names in lanes.items():
        counts = await state.stream_entries(pool, names)
        busy |= {(pool, name) for name, count in zip(names, counts, strict=True) if count}
    return schemas.ClusterFacts(now, loads, leader, busy)


@router.get("/models/{name}/settings", summary="Where and how often a model is loaded", responses=documented(400, 404))
async def get_settings(name: str, deps: DepsOf) -> schemas.EndpointSettings:
    deps.catalog.snapshot.model(name)
    endpoint = await asyncio.to_thread(deps.repository.endpoint, name)
    return await _settings(deps, name, endpoint.generation, endpoint.placement)


@router.patch(
    "/models/{name}",
    summary="Change where and how often a model is loaded",
    description="Fields that the document leaves out keep their values; null restores a default. Of `labels`, those "
    "that are named change; null removes one. `owner` needs the scope `admin`. The settings hold for the model's "
    "endpoint, and take effect at once.",
    responses=documented(400, 403, 404, 409, 413, 503, 507),
    openapi_extra=json_body(EndpointPlacement, example={"instances_min": 1, "pin": True}),
)
async def configure_model(name: str, request: Request, deps: DepsOf) -> schemas.EndpointSettings:
    changes = parse_json(await read_body(request, DOCUMENT_BYTES_MAX))
    deps.catalog.snapshot.model(name)
    if "owner" in changes:
        require(Need.ADMIN, name)
    with audited("configure", name):
        known = await known_pools(deps, name)
        quotas = Quotas(deps.gate, deps.catalog, deps.repository)
        endpoint = await in_storage_thread(
            endpoint_changes.configure,
            deps.repository,
            name,
            changes,
            known,
            lambda settings: quotas.check_settings(name, settings, deps.footprint),
        )
    audit("configured", name, **{field: changes[field] for field in sorted(changes)})
    await deps.catalog.announce(name)
    return await _settings(deps, name, endpoint.generation, endpoint.placement)


async def _settings(deps: Deps, name: str, generation: int, settings: EndpointPlacement) -> schemas.EndpointSettings:
    leader: Leader | None = None
    with suppress(Failure):
        leader = await deps.cluster_state.leader()
    workers = Counter(worker.pool for worker in deps.catalog.snapshot.workers)
    warnings = endpoint_changes.warnings(settings, workers, leads=leader is not None)
    return schemas.EndpointSettings(model=name, generation=generation, settings=settings, warnings=warnings)
