"""All rows of the authorisation table: the core's, and those of the plug-ins."""

from __future__ import annotations

from millstream.gateway.app import adapters
from millstream.gateway.grpc.handlers import rows

HTTP = {key: row for adapter in adapters() for key, row in adapter.access.items()}
GRPC = rows()


def url_of(path: str, model: str) -> str:
    """Return the URL of a route for a model."""
    for parameter in ("model", "name", "endpoint"):
        path = path.replace(f"{{{parameter}}}", model)
    for parameter in ("version", "label", "region", "repository", "key", "pool"):
        path = path.replace(f"{{{parameter}}}", "1")
    return path
