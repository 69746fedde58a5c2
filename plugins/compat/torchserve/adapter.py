"""adapter: registers the routes of TorchServe: predictions, and the management of models."""

from __future__ import annotations

from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.plugins.compat.torchserve import errors, routes, routes_management, schemas

_TAG = Tag("TorchServe", "Predictions, and the management of models from files of this machine.")

ADAPTER = Adapter(
    routes=(
        Routes(routes.router, _TAG),
        Routes(routes_management.router, _TAG, keyed=True),
    ),
    error_format=errors.FORMAT,
    error_paths=("/predictions/", "/explanations/", "/models", "/ping", "/api-description"),
    schemas=schemas.SCHEMAS,
)
