"""operation: the adapter of the metrics page and the documentation page, which belong to no protocol."""

from __future__ import annotations

from millstream.gateway.protocols.http import docs, metrics
from millstream.gateway.protocols.http.adapter import Adapter, Routes, Tag

ADAPTER = Adapter(
    routes=(
        Routes(metrics.router, Tag("operation", "For operators of the server.")),
        Routes(docs.router),
    )
)
