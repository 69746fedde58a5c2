"""A cache of parsed metric files: chunks whose bytes did not change are not parsed again.

Series of one subject are adjacent, and idle subjects do not change, so the cost of a scrape depends on the series in
use, not on all series.
"""

from __future__ import annotations

from collections.abc import Iterator

from millstream.services.metrics.record import CHUNK_BYTES, Key, has_series, parse_chunk

Series = tuple[Key, list[float]]


class ReadCache:
    """Stores the series of each chunk of each file. Not thread-safe."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[tuple[bytes, list[Series]]]] = {}
        self._keys: dict[bytes, Key] = {}

    def series(self, name: str, content: bytes) -> Iterator[Series]:
        """Yield the live series of the file `name` with this content."""
        known = self._chunks.get(name, [])
        chunks: list[tuple[bytes, list[Series]]] = []
        if has_series(content):
            for index, start in enumerate(range(0, len(content), CHUNK_BYTES)):
                chunk = content[start : start + CHUNK_BYTES]
                if index < len(known) and known[index][0] == chunk:
                    chunks.append(known[index])
                else:
                    chunks.append((chunk, list(parse_chunk(memoryview(chunk), start == 0, self._keys))))
        self._chunks[name] = chunks
        for _, series in chunks:
            yield from series

    def keep_only(self, names: set[str]) -> None:
        """Forget all other files: they no longer exist."""
        for name in self._chunks.keys() - names:
            del self._chunks[name]
        live = sum(len(series) for chunks in self._chunks.values() for _, series in chunks)
        if len(self._keys) > 2 * live + 1000:  # keys of series that no longer exist
            self._keys.clear()
