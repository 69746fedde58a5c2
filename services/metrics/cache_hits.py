"""Derives the requests that found their model loaded, when a page is made: no request pays for it.

rows of a page: requests answered, misses among them ─> CacheHits.rows ─> hits = requests - misses

Both counts change at the end of a request, but in files that are read one after the other: a page may see a request in
one of them only. Hits therefore never fall below those of the page before.
"""

from __future__ import annotations

from collections.abc import Mapping

from millstream.services.metrics.catalogue import CACHE_MISSES, REQUESTS
from millstream.services.metrics.exposition import Rows, Shape, shape_of

_Version = tuple[str, ...]  # model, version


class CacheHits:
    """Computes hits for the pages of one process. Not thread-safe."""

    def __init__(self) -> None:
        self._shown: dict[_Version, float] = {}

    def rows(self, rows: Mapping[Shape, Rows]) -> Rows:
        """Return the hits of each version on a page with these rows."""
        hits: dict[_Version, float] = {}
        for labels, (count,) in rows.get(shape_of(REQUESTS), ()):
            hits[labels[:2]] = hits.get(labels[:2], 0.0) + count
        for labels, (count,) in rows.get(shape_of(CACHE_MISSES), ()):
            hits[labels] = hits.get(labels, 0.0) - count
        self._shown = {version: max(0.0, count, self._shown.get(version, 0.0)) for version, count in hits.items()}
        return [(version, [count]) for version, count in self._shown.items()]
