"""facts: what a version needs, before a worker has measured it."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.services.controller.controller import Facts
from millstream.services.model.manifest import EndpointPlacement, Manifest
from millstream.services.placement.views import Footprint


def pools_of(manifest: Manifest, settings: EndpointPlacement) -> Sequence[str]:
    """Return the pools that may serve a version."""
    return settings.pools or (manifest.config.pool,)


def footprint_of(manifest: Manifest, pool: str) -> Footprint:
    """Predict what a version takes."""
    del pool
    size = sum(file.size_bytes for file in manifest.files)
    return Footprint(int(1.5 * size), size, 1.0)


INSTALLED = Facts(pools_of, footprint_of)
