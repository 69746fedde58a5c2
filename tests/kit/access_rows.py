"""All rows of the authorisation table of HTTP routes: the core's, and those of the plug-ins."""

from __future__ import annotations

from millstream.gateway.app import adapters

HTTP = {key: row for adapter in adapters() for key, row in adapter.access.items()}
