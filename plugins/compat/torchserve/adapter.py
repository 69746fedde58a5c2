"""adapter: registers the routes of TorchServe: predictions, and the management of models."""

from __future__ import annotations

from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.plugins.compat.torchserve import errors, routes, routes_management, schemas
from millstream.services.access.scopes import Need
from millstream.services.access.table import LIST, Row

_TAG = Tag("TorchServe", "Predictions, and the management of models from files of this machine.")

_MODEL = "/models/{model}"
_RUN, _DESCRIBE, _WRITE = Row(Need.INFER, "model"), Row(Need.DESCRIBE, "model"), Row(Need.WRITE, "model", changes=True)

ADAPTER = Adapter(
    routes=(
        Routes(routes.router, _TAG, order=130),
        Routes(routes_management.router, _TAG, keyed=True, order=130),
    ),
    access={
        ("POST", "/predictions/{model}"): _RUN,
        ("POST", "/predictions/{model}/{version}"): _RUN,
        ("POST", "/explanations/{model}"): _RUN,
        ("GET", "/ping"): Row(Need.OPEN),
        ("GET", "/api-description"): Row(Need.OPEN),
        ("OPTIONS", "/"): Row(Need.OPEN),
        ("GET", "/models"): LIST,
        ("POST", "/models"): Row(Need.WRITE, changes=True),
        ("GET", _MODEL): _DESCRIBE,
        ("GET", f"{_MODEL}/all"): _DESCRIBE,
        ("GET", f"{_MODEL}/{{version}}"): _DESCRIBE,
        ("PUT", _MODEL): _WRITE,
        ("PUT", f"{_MODEL}/{{version}}"): _WRITE,
        ("PUT", f"{_MODEL}/{{version}}/set-default"): _WRITE,
        ("DELETE", _MODEL): _WRITE,
        ("DELETE", f"{_MODEL}/{{version}}"): _WRITE,
    },
    protocols=("torchserve",),
    error_format=errors.FORMAT,
    error_paths=("/predictions/", "/explanations/", "/models", "/ping", "/api-description"),
    schemas=schemas.SCHEMAS,
)
