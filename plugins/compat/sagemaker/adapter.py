"""adapter: registers the routes of SageMaker: the calls of its containers, and its runtime API."""

from __future__ import annotations

from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.plugins.compat.sagemaker import errors, routes, routes_ping, schemas

_TAG = Tag("SageMaker", "The calls of SageMaker's containers, and its runtime API for boto3.")

ADAPTER = Adapter(
    routes=(Routes(routes_ping.router, _TAG), Routes(routes.router, _TAG)),
    error_format=errors.FORMAT,
    error_paths=("/endpoints/",),  # a container's own errors have the plain format
    schemas=schemas.SCHEMAS,
)
