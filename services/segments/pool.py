"""All shared memory of one gateway: segments that come when needed, go when empty, and never exceed a limit."""

from __future__ import annotations

import itertools
from pathlib import Path

from millstream.services.errors import Failure
from millstream.services.metrics.registry import Gauge
from millstream.services.segments.segment import Segment
from millstream.services.wire.batch import Place

SEGMENT_BYTES = 32 << 20


class SegmentPool:
    """Places for tensors. `prefix`: the installation's; the owner makes it unique with its own name.

    `in_use`: shows the bytes of all places that are not free.
    """

    def __init__(self, folder: Path, prefix: str, bytes_max: int, in_use: Gauge | None = None) -> None:
        self._folder = folder
        self._prefix = prefix
        self._bytes_max = bytes_max
        self._in_use = in_use
        self._numbers = itertools.count(1)
        self._segments: dict[str, Segment] = {}

    @property
    def in_use_bytes(self) -> int:
        return sum(segment.arena.in_use_bytes for segment in self._segments.values())

    @property
    def size_bytes(self) -> int:
        return sum(segment.arena.size_bytes for segment in self._segments.values())

    def allocate(self, size_bytes: int) -> Place | None:
        """A place, or None when the limit or the memory file system allows no more: send the tensor another way."""
        place = self._allocate(size_bytes)
        self._show()
        return place

    def _show(self) -> None:
        if self._in_use is not None:
            self._in_use.set(self.in_use_bytes)

    def _allocate(self, size_bytes: int) -> Place | None:
        for segment in self._segments.values():
            place = segment.allocate(size_bytes)
            if place is not None:
                return place
        wanted = max(SEGMENT_BYTES, size_bytes + 64)
        left = self._bytes_max - self.size_bytes
        wanted = min(wanted, left)
        if wanted < size_bytes + 64:
            return None
        try:
            segment = Segment(self._folder, f"{self._prefix}-{next(self._numbers)}", wanted)
        except Failure:
            return None
        self._segments[segment.name] = segment
        return segment.allocate(size_bytes)

    def view(self, place: Place) -> memoryview:
        """The bytes of a place, writable. Raises ValueError for a segment that is not of this pool."""
        segment = self._segments.get(place.segment)
        if segment is None:
            raise ValueError(f"no segment {place.segment}")
        return segment.view[place.offset : place.offset + place.size_bytes]

    def free(self, place: Place) -> None:
        """Give a place back; an empty segment goes too, unless it is the last one."""
        segment = self._segments[place.segment]
        segment.free(place)
        if not segment.arena.in_use_bytes and len(self._segments) > 1:
            del self._segments[place.segment]
            segment.close()
        self._show()

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
