"""The shared memory of one gateway: segments are created when needed and removed when empty, up to a limit."""

from __future__ import annotations

import itertools
from pathlib import Path

from millstream.services.errors import Failure
from millstream.services.metrics.registry import Gauge
from millstream.services.segments.segment import Segment
from millstream.services.wire.batch import ShmSlice

SEGMENT_BYTES = 32 << 20


class SegmentPool:
    """Allocates slices of shared memory for tensors.

    Args:
        prefix: of the names of segments: the installation's, and the owner's own name.
        in_use: gauge of the allocated bytes.
    """

    def __init__(self, folder: Path, prefix: str, bytes_max: int, in_use: Gauge | None = None) -> None:
        self._folder = folder
        self._prefix = prefix
        self._bytes_max = bytes_max
        self._in_use = in_use
        self._numbers = itertools.count(1)
        self._segments: dict[str, Segment] = {}
        self._shares: dict[tuple[str, int], int] = {}  # segment and offset of a slice -> its users without the first

    @property
    def in_use_bytes(self) -> int:
        return sum(segment.arena.in_use_bytes for segment in self._segments.values())

    @property
    def size_bytes(self) -> int:
        return sum(segment.arena.size_bytes for segment in self._segments.values())

    def allocate(self, size_bytes: int) -> ShmSlice | None:
        """Return a slice, or None if the limit or the memory file system allows no more: send the tensor inline."""
        shm = self._allocate(size_bytes)
        self._update_gauge()
        return shm

    def _update_gauge(self) -> None:
        if self._in_use is not None:
            self._in_use.set(self.in_use_bytes)

    def _allocate(self, size_bytes: int) -> ShmSlice | None:
        for segment in self._segments.values():
            shm = segment.allocate(size_bytes)
            if shm is not None:
                return shm
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

    def view(self, shm: ShmSlice) -> memoryview:
        """Return the bytes of a slice, writable. Raises ValueError for a segment that is not of this pool."""
        segment = self._segments.get(shm.segment)
        if segment is None:
            raise ValueError(f"no segment {shm.segment}")
        return segment.view[shm.offset : shm.offset + shm.size_bytes]

    def share(self, shm: ShmSlice) -> None:
        """Add a user of an allocated slice: it is free when each of its users has freed it."""
        key = shm.segment, shm.offset
        self._shares[key] = self._shares.get(key, 0) + 1

    def free(self, shm: ShmSlice) -> None:
        """Free a slice if no other user shares it, and remove its segment if that is empty and not the last one."""
        if self._shares and self._unshare(shm):
            return
        segment = self._segments[shm.segment]
        segment.free(shm)
        if not segment.arena.in_use_bytes and len(self._segments) > 1:
            del self._segments[shm.segment]
            segment.close()
        self._update_gauge()

    def _unshare(self, shm: ShmSlice) -> bool:
        """Take off a user of a slice; return whether there was another one."""
        key = shm.segment, shm.offset
        others = self._shares.pop(key, 0)
        if others > 1:
            self._shares[key] = others - 1
        return others > 0

    def remove_empty(self) -> None:
        """Remove every empty segment, the last one too: its pages count as memory of this process."""
        for name, segment in [*self._segments.items()]:
            if not segment.arena.in_use_bytes:
                del self._segments[name]
                segment.close()

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
