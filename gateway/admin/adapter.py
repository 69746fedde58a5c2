"""Registers the routes of the admin API."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.gateway.admin import (
    routes_keys,
    routes_models,
    routes_placement,
    routes_server,
    routes_uploads,
    schemas_models,
)
from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.services.access.scopes import Need, Row

_MODELS = Tag("admin: models", "Models and their versions: upload, activate, delete.", Place.OPEN)
_PLACEMENT = Tag("admin: placement", "Which worker holds what.", Place.OPEN)
_KEYS = Tag("admin: keys", "API keys, and the audit log.", Place.OPEN)
_POOLS = Tag("admin: pools", "Worker pools and workers.", Place.OPEN)
_LOGS = Tag("admin: logs", "How much processes log.", Place.OPEN)


def _rows() -> Iterator[tuple[tuple[str, str], Row]]:
    read, write = Row(Need.READ, admin=True), Row(Need.WRITE, "name", changes=True, admin=True)
    keys, change = Row(Need.ADMIN, admin=True), Row(Need.ADMIN, changes=True, admin=True)
    one = "/admin/v1/models/{name}"
    version = f"{one}/versions/{{version}}"
    for name in ("models", "placement", "pools", "workers", "audit", "log-level"):
        yield ("GET", f"/admin/v1/{name}"), read
    for path in (one, version, f"{one}/settings"):
        yield ("GET", path), Row(Need.READ, "name", admin=True)
    for method, path in (
        ("PATCH", one),
        ("DELETE", one),
        ("PUT", version),
        ("DELETE", version),
        ("POST", f"{one}/versions"),
        ("POST", f"{version}/activate"),
    ):
        yield (method, path), write
    for method, path, row in (
        ("GET", "", keys),
        ("GET", "/{key}", keys),
        ("POST", "", change),
        ("PATCH", "/{key}", change),
        ("POST", "/{key}/rotate", change),
        ("DELETE", "/{key}", change),
    ):
        yield (method, f"/admin/v1/keys{path}"), row
    yield ("PUT", "/admin/v1/log-level"), change


ADAPTER = Adapter(
    routes=(
        Routes(routes_models.router, _MODELS, keyed=True, order=300),
        Routes(routes_uploads.router, _MODELS, keyed=True, order=300),
        Routes(routes_placement.router, _PLACEMENT, keyed=True, order=320),
        Routes(routes_keys.router, _KEYS, keyed=True, order=340),
        Routes(routes_server.pools_router, _POOLS, keyed=True, order=340),
        Routes(routes_server.logs_router, _LOGS, keyed=True, order=340),
    ),
    access=dict(_rows()),
    schemas=(
        routes_keys.NewKey,
        routes_keys.KeyChanges,
        routes_keys.Rotation,
        routes_server.LogLevels,
        schemas_models.UploadForm,
    ),
)
