"""The adapter of the start page, the metrics page and the OpenAPI page, which belong to no protocol."""

from __future__ import annotations

from millstream.gateway.http import docs, metrics
from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.services.access.scopes import Need, Row

_TAG = Tag("operation", "For operators of the server.", Place.OPEN)

ADAPTER = Adapter(
    routes=(
        Routes(docs.start, _TAG, order=400),
        Routes(metrics.router, _TAG, order=400),
        Routes(docs.router, order=400),
    ),
    access={
        **{("GET", path): Row(Need.OPEN) for path in ("/", "/openapi.json", "/docs", "/docs/assets/{name}")},
        ("GET", "/metrics"): Row(Need.METRICS),
    },
    schemas=(docs.Alive,),
)
