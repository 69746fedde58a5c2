"""operation: the adapter of the start page, the metrics page and the OpenAPI page, which belong to no protocol."""

from __future__ import annotations

from millstream.gateway.http import docs, metrics
from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag

_TAG = Tag("operation", "For operators of the server.", Place.OPEN)

ADAPTER = Adapter(
    routes=(
        Routes(docs.start, _TAG),
        Routes(metrics.router, _TAG),
        Routes(docs.router),
    ),
    schemas=(docs.Alive,),
)
