"""The adapter of what belongs to no protocol: the metrics page and the documentation page."""

from __future__ import annotations

from millstream.gateway.protocols.http import docs, metrics
from millstream.gateway.protocols.http.adapter import Adapter, Routes, Tag

ADAPTER = Adapter(
    routes=(
        Routes(metrics.router, Tag("operation", "For operators of the server.")),
        Routes(docs.router),
    )
)
