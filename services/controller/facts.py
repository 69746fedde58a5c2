"""facts: what a version needs, before a worker has measured it."""

from __future__ import annotations

from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint


def footprint_of(manifest: Manifest, pool: str) -> Footprint:
    """Predict what a version takes."""
    del pool
    size = sum(file.size_bytes for file in manifest.files)
    return Footprint(int(1.5 * size), size, 1.0)
