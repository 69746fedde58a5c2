"""Metric files as they were read last: pieces whose bytes did not change are not parsed again.

Series of one subject lie together, and idle subjects do not change: a scrape costs what is in use, not what there is.
"""

from __future__ import annotations

from collections.abc import Iterator

from millstream.services.metrics.record import CHUNK_BYTES, Key, has_series, parsed_chunk

Series = tuple[Key, list[float]]


class ReadCache:
    """Remembers the series of each piece of each file. For one thread at a time."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[bytes, list[Series]]]] = {}
        self._keys: dict[bytes, Key] = {}

    def series(self, name: str, content: bytes) -> Iterator[Series]:
        """The live series of the file `name`, which has this content now."""
        known = self._pieces.get(name, [])
        pieces: list[tuple[bytes, list[Series]]] = []
        if has_series(content):
            for index, start in enumerate(range(0, len(content), CHUNK_BYTES)):
                piece = content[start : start + CHUNK_BYTES]
                if index < len(known) and known[index][0] == piece:
                    pieces.append(known[index])
                else:
                    pieces.append((piece, list(parsed_chunk(memoryview(piece), start == 0, self._keys))))
        self._pieces[name] = pieces
        for _, found in pieces:
            yield from found

    def keep(self, names: set[str]) -> None:
        """Forget all other files: they are gone."""
        for name in self._pieces.keys() - names:
            del self._pieces[name]
        live = sum(len(found) for pieces in self._pieces.values() for _, found in pieces)
        if len(self._keys) > 2 * live + 1000:  # those of series that are gone
            self._keys.clear()
