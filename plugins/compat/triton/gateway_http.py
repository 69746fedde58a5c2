"""Triton's extensions of v2 over HTTP, and its routes for configuration and statistics.

GET /v2/models/{model}[/versions/{version}]/config        the model configuration in effect
GET /v2/models[/{model}[/versions/{version}]]/stats       statistics since versions were loaded, over all gateways
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter

from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag, versioned
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import ref, reply
from millstream.gateway.v2.routes_models import INFERENCE, VERSIONED
from millstream.plugins.compat.triton import routes_generate, routes_repository, routes_shared_memory, routes_trace
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.schemas import SCHEMAS, ModelConfiguration, Statistics
from millstream.services.access.scopes import LIST, Need, Row

_EXTENSIONS = Tag("v2 extensions", "Triton's extensions: statistics, traces, logging.", Place.LAST)
_SHARED_MEMORY = Tag(
    "v2 shared memory", "Triton's extensions: memory of clients on this machine, for tensors.", Place.LAST
)
_REPOSITORY = Tag("v2 model repository", "Triton's extensions: model configuration and model repository.", Place.LAST)

config = APIRouter()
stats = APIRouter()

_CONFIG = reply(
    ref(ModelConfiguration),
    "The configuration in effect, defaults included.",
    example={
        "name": "digits",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": 64,
        "input": [{"name": "pixels", "data_type": "TYPE_FP32", "dims": [64]}],
        "output": [{"name": "label", "data_type": "TYPE_INT64", "dims": [1]}],
        "dynamic_batching": {"max_queue_delay_microseconds": 0},
    },
) | documented(404)


@versioned(
    config,
    "GET",
    "/v2/models/{model}[/versions/{version}]/config",
    ("Configuration of the model's serving version", "Configuration of one version"),
    responses=_CONFIG,
)
async def model_config(model: str, version: str | None, deps: DepsOf) -> dict[str, Any]:
    return deps.part(Triton).config_of(model, version)


_STATISTICS = reply(ref(Statistics), "Statistics since the versions were loaded, over all gateways.")


@stats.get("/v2/models/stats", summary="Statistics of all loaded versions", responses=_STATISTICS)
async def statistics(deps: DepsOf) -> dict[str, Any]:
    return dict(await deps.part(Triton).statistics.of(None, None))


@stats.get(
    "/v2/models/{model}/stats",
    summary="Statistics of the model's loaded versions",
    responses=_STATISTICS | documented(400),
)
async def model_statistics(model: str, deps: DepsOf) -> dict[str, Any]:
    return dict(await deps.part(Triton).statistics.of(model, None))


@stats.get(
    "/v2/models/{model}/versions/{version}/stats",
    summary="Statistics of one version",
    responses=_STATISTICS | documented(400, 404),
)
async def model_statistics_version(model: str, version: str, deps: DepsOf) -> dict[str, Any]:
    return dict(await deps.part(Triton).statistics.of(model, version))


def _extension_rows() -> Iterator[tuple[tuple[str, str], Row]]:
    describe, write = Row(Need.DESCRIBE, "model"), Row(Need.WRITE, "model", changes=True)
    for version in VERSIONED:
        path = f"/v2/models/{{model}}{version}"
        for call in ("generate", "generate_stream"):
            yield ("POST", f"{path}/{call}"), Row(Need.INFER, "model")
        for rest in ("/stats", "/config"):
            yield ("GET", f"{path}{rest}"), describe
    yield ("GET", "/v2/models/stats"), LIST
    for path in ("/v2/trace/setting", "/v2/logging"):
        yield ("GET", path), Row(Need.DESCRIBE)
        yield ("POST", path), Row(Need.ADMIN, changes=True)
    yield ("GET", "/v2/models/{model}/trace/setting"), describe
    yield ("POST", "/v2/models/{model}/trace/setting"), write
    for kind in ("system", "cuda"):
        memory = f"/v2/{kind}sharedmemory"
        yield ("GET", f"{memory}/status"), Row(Need.MEMORY)
        yield ("GET", f"{memory}/region/{{region}}/status"), Row(Need.MEMORY)
        for path in ("/region/{region}/register", "/region/{region}/unregister", "/unregister"):
            yield ("POST", f"{memory}{path}"), Row(Need.MEMORY, changes=True)
    for repository in ("/v2/repository", "/v2/repository/{repository}"):
        yield ("POST", f"{repository}/index"), LIST
        for call in ("load", "unload"):
            yield ("POST", f"{repository}/models/{{model}}/{call}"), write


ADAPTER = Adapter(
    routes=(
        Routes(routes_generate.router, INFERENCE, order=10),
        Routes(stats, _EXTENSIONS, order=30),  # before models: "stats" is no model there
        Routes(routes_trace.router, _EXTENSIONS, order=30),
        Routes(routes_trace.protected, _EXTENSIONS, keyed=True, order=30),
        Routes(routes_shared_memory.router, _SHARED_MEMORY, keyed=True, order=50),
        Routes(config, _REPOSITORY, order=50),
        Routes(routes_repository.router, _REPOSITORY, order=50),
        Routes(routes_repository.protected, _REPOSITORY, keyed=True, order=50),
    ),
    access=dict(_extension_rows()),
    protocols=("generate",),
    schemas=(*SCHEMAS, routes_shared_memory.SystemRegistration),
)
