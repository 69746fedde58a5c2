"""adapter: registers the routes of the Open Inference Protocol v2 over HTTP, with Triton's extensions."""

from __future__ import annotations

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

_INFERENCE = Tag("v2 inference", "The Open Inference Protocol v2, with Triton's binary tensors.", Place.OPEN)
_EXTENSIONS = Tag("v2 extensions", "Triton's extensions: statistics, traces, logging.", Place.LAST)
_SHARED_MEMORY = Tag(
    "v2 shared memory", "Triton's extensions: memory of clients on this machine, for tensors.", Place.LAST
)
_REPOSITORY = Tag("v2 model repository", "Triton's extensions: model configuration and model repository.", Place.LAST)

ADAPTER = Adapter(
    routes=(
        Routes(routes_infer.router, _INFERENCE),
        Routes(routes_generate.router, _INFERENCE),
        Routes(routes_health.router, _INFERENCE),
        Routes(routes_statistics.router, _EXTENSIONS),  # before models: "stats" is no model there
        Routes(routes_trace.router, _EXTENSIONS),
        Routes(routes_trace.protected, _EXTENSIONS, keyed=True),
        Routes(routes_models.router, _INFERENCE),
        Routes(routes_shared_memory.router, _SHARED_MEMORY, keyed=True),
        Routes(routes_config.router, _REPOSITORY),
        Routes(routes_repository.router, _REPOSITORY),
        Routes(routes_repository.protected, _REPOSITORY, keyed=True),
    ),
    schemas=(*schemas.SCHEMAS, routes_shared_memory.SystemRegistration),
)
