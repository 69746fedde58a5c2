"""Buffers in shared memory for bytes that a gateway receives: a worker reads them where they arrived.

allocate ─> SharedBuffer ─> views of it ……… the last view is gone ─> its slice is free, unless a batch still shares it
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple, cast

import numpy as np

from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.segment import ALIGN_BYTES
from millstream.services.wire.batch import ALIGN_BYTES as ELEMENT_BYTES
from millstream.services.wire.batch import ShmSlice

#: the part of the shared memory that received bytes may take; the rest is for batches and outputs
SHARE = 0.5


class SharedBuffer(np.ndarray[Any, Any]):
    """Bytes in shared memory. Its slice is freed when it and all `memoryview`s of it are gone. Made by SharedBuffers.

    An array, because in Python only objects of extensions can be viewed and tell when the last view is gone.
    """

    shm: ShmSlice  # which has room for more bytes than the buffer, before and after it
    offset: int  # of the first byte in the segment
    address: int  # of the first byte in this process
    owner: SharedBuffers | None = None  # None: a view that numpy made, which is not to free the slice

    def bytes_view(self) -> memoryview:
        """Return the bytes, writable."""
        return memoryview(cast("Any", self))

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.drop(self.shm)


class Place(NamedTuple):
    """Where bytes lie in shared memory."""

    shm: ShmSlice  # the bytes
    within: ShmSlice  # the slice of the buffer that has them, which is shared and freed as a whole


class SharedBuffers:
    """The buffers of one gateway. Call it in its event loop; views may be dropped in any thread.

    Args:
        segments: has the memory.
        bytes_max: limit on all buffers together.
    """

    def __init__(self, segments: SegmentPool, bytes_max: int) -> None:
        self._segments = segments
        self._bytes_max = bytes_max
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dropped: deque[ShmSlice] = deque()
        self.in_use_bytes = 0

    def allocate(self, size_bytes: int, aligned_at: int = 0) -> SharedBuffer | None:
        """Return a buffer of `size_bytes` bytes, at least 1; None if there is no room: use other memory.

        Args:
            size_bytes: its length.
            aligned_at: index of the byte whose address is to be a multiple of `arena.ALIGN_BYTES`.
        """
        self._collect()
        before = -aligned_at % ALIGN_BYTES
        slice_bytes = before + size_bytes
        if self.in_use_bytes + slice_bytes > self._bytes_max:
            return None
        shm = self._segments.allocate(slice_bytes)
        if shm is None:
            return None
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.in_use_bytes += slice_bytes
        buffer = np.frombuffer(self._segments.view(shm), np.uint8)[before:].view(SharedBuffer)
        buffer.shm = shm
        buffer.offset = shm.offset + before
        buffer.address = buffer.ctypes.data
        buffer.owner = self
        return buffer

    def drop(self, shm: ShmSlice) -> None:
        """Free a slice soon: not here, because the garbage collector may call it anywhere."""
        self._dropped.append(shm)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        while self._dropped:
            shm = self._dropped.popleft()
            self.in_use_bytes -= shm.size_bytes
            self._segments.free(shm)


def place_of(data: object) -> Place | None:
    """Return where `data` lies, if it is a view of a SharedBuffer that starts where any element may start."""
    buffer: Any = data.obj if type(data) is memoryview else None
    if type(buffer) is not SharedBuffer or type(data) is not memoryview:
        return None
    offset = buffer.offset + np.frombuffer(data, np.uint8).ctypes.data - buffer.address
    if offset % ELEMENT_BYTES:
        return None
    return Place(ShmSlice(buffer.shm.segment, offset, data.nbytes), buffer.shm)
