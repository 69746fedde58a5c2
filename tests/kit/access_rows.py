"""All rows of the authorisation table: the core's, and those of the plug-ins."""

from __future__ import annotations

from millstream.gateway.app import adapters
from millstream.gateway.grpc.handlers import rows

HTTP = {key: row for adapter in adapters() for key, row in adapter.access.items()}
GRPC = rows()
