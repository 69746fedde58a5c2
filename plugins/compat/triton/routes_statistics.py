"""routes_statistics: GET /v2/models/stats and …/{model}[/versions/{version}]/stats: Triton's statistics extension."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import ref, reply
from millstream.gateway.v2.schemas import Statistics
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.statistics import stats_document

router = APIRouter()


_STATISTICS = reply(ref(Statistics), "Statistics since the versions were loaded, over all gateways.")


@router.get("/v2/models/stats", summary="Statistics of all loaded versions", responses=_STATISTICS)
async def statistics(deps: DepsOf) -> dict[str, Any]:
    return stats_document(await deps.part(Triton).statistics.of(None, None))


@router.get(
    "/v2/models/{model}/stats",
    summary="Statistics of the model's loaded versions",
    responses=_STATISTICS | documented(400),
)
async def model_statistics(model: str, deps: DepsOf) -> dict[str, Any]:
    return stats_document(await deps.part(Triton).statistics.of(model, None))


@router.get(
    "/v2/models/{model}/versions/{version}/stats",
    summary="Statistics of one version",
    responses=_STATISTICS | documented(400, 404),
)
async def model_statistics_version(model: str, version: str, deps: DepsOf) -> dict[str, Any]:
    return stats_document(await deps.part(Triton).statistics.of(model, version))
