"""adapter: registers the routes of the admin API."""

from __future__ import annotations

from millstream.gateway.admin import (
    routes_keys,
    routes_models,
    routes_placement,
    routes_server,
    routes_uploads,
    schemas_models,
)
from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.plugins.compile.gateway import routes_races, schemas_races
from millstream.plugins.fleet.gateway import routes_scale

_MODELS = Tag("admin: models", "Models and their versions: upload, activate, delete.", Place.OPEN)

ADAPTER = Adapter(
    routes=(
        Routes(routes_models.router, _MODELS, keyed=True),
        Routes(routes_uploads.router, _MODELS, keyed=True),
        Routes(
            routes_races.router, Tag("admin: races", "Compiled forms of a version, measured.", Place.OPEN), keyed=True
        ),
        Routes(routes_placement.router, Tag("admin: placement", "Which worker holds what.", Place.OPEN), keyed=True),
        Routes(
            routes_scale.router, Tag("admin: scale", "How many workers each pool should have.", Place.OPEN), keyed=True
        ),
        Routes(routes_keys.router, Tag("admin: keys", "API keys, and the audit log.", Place.OPEN), keyed=True),
        Routes(routes_server.pools_router, Tag("admin: pools", "Worker pools and workers.", Place.OPEN), keyed=True),
        Routes(routes_server.logs_router, Tag("admin: logs", "How much processes log.", Place.OPEN), keyed=True),
    ),
    schemas=(
        routes_keys.NewKey,
        routes_keys.KeyChanges,
        routes_keys.Rotation,
        routes_server.LogLevels,
        schemas_models.UploadForm,
        schemas_races.RaceRequest,
    ),
)
