"""adapter: registers the routes of the Open Inference Protocol v2 over HTTP, with Triton's extensions."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.v2 import routes_health, routes_infer, routes_models, schemas
from millstream.plugins.compat.triton import (
    routes_config,
    routes_generate,
    routes_repository,
    routes_shared_memory,
    routes_statistics,
    routes_trace,
)
from millstream.services.access.scopes import Need
from millstream.services.access.table import LIST, Row
from millstream.services.metrics.catalogue import RequestProtocol

_INFERENCE = Tag("v2 inference", "The Open Inference Protocol v2, with Triton's binary tensors.", Place.OPEN)
_EXTENSIONS = Tag("v2 extensions", "Triton's extensions: statistics, traces, logging.", Place.LAST)
_SHARED_MEMORY = Tag(
    "v2 shared memory", "Triton's extensions: memory of clients on this machine, for tensors.", Place.LAST
)
_REPOSITORY = Tag("v2 model repository", "Triton's extensions: model configuration and model repository.", Place.LAST)

_VERSIONED = ("", "/versions/{version}")


def _rows() -> Iterator[tuple[tuple[str, str], Row]]:
    for version in _VERSIONED:
        path = f"/v2/models/{{model}}{version}"
        yield ("POST", f"{path}/infer"), Row(Need.INFER, "model")
        for rest in ("", "/ready"):
            yield ("GET", f"{path}{rest}"), Row(Need.DESCRIBE, "model")
    for path in ("/v2", "/v2/", "/v2/health/live", "/v2/health/ready"):
        yield ("GET", path), Row(Need.OPEN)
    yield ("GET", "/v2/models"), LIST


def _extension_rows() -> Iterator[tuple[tuple[str, str], Row]]:
    describe, write = Row(Need.DESCRIBE, "model"), Row(Need.WRITE, "model", changes=True)
    for version in _VERSIONED:
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
        Routes(routes_infer.router, _INFERENCE, order=0),
        Routes(routes_health.router, _INFERENCE, order=20),
        Routes(routes_models.router, _INFERENCE, order=40),
    ),
    access=dict(_rows()),
    protocols=(RequestProtocol.V2,),
    schemas=schemas.SCHEMAS,
)
EXTENSIONS = Adapter(
    routes=(
        Routes(routes_generate.router, _INFERENCE, order=10),
        Routes(routes_statistics.router, _EXTENSIONS, order=30),  # before models: "stats" is no model there
        Routes(routes_trace.router, _EXTENSIONS, order=30),
        Routes(routes_trace.protected, _EXTENSIONS, keyed=True, order=30),
        Routes(routes_shared_memory.router, _SHARED_MEMORY, keyed=True, order=50),
        Routes(routes_config.router, _REPOSITORY, order=50),
        Routes(routes_repository.router, _REPOSITORY, order=50),
        Routes(routes_repository.protected, _REPOSITORY, keyed=True, order=50),
    ),
    access=dict(_extension_rows()),
    protocols=("generate",),
    schemas=(routes_shared_memory.SystemRegistration,),
)
