"""adapter: registers the routes of the admin API."""

from __future__ import annotations

from millstream.gateway.admin import routes_models, routes_placement, routes_pools, routes_uploads, schemas_models
from millstream.gateway.protocols.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.protocols.http.auth import admin

_MODELS = Tag("admin: models", "Models and their versions: upload, activate, delete.", Place.OPEN)

ADAPTER = Adapter(
    routes=(
        Routes(routes_models.router, _MODELS, admin),
        Routes(routes_uploads.router, _MODELS, admin),
        Routes(routes_placement.router, Tag("admin: placement", "Which worker holds what.", Place.OPEN), admin),
        Routes(routes_pools.router, Tag("admin: pools", "Worker pools and workers.", Place.OPEN), admin),
    ),
    schemas=(schemas_models.UploadForm,),
)
