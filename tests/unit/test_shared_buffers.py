"""Buffers in shared memory: they live as long as a view of them or a batch that shares their slice."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.segment import ALIGN_BYTES, Segments
from millstream.services.segments.shared_buffers import SharedBuffers, place_of

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture
def segments() -> Iterator[SegmentPool]:
    folder = Path(f"/dev/shm/millstream-buffers-{os.getpid()}")
    folder.mkdir()
    pool = SegmentPool(folder, "a", 64 * MIB)
    yield pool
    pool.close()
    shutil.rmtree(folder)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_worker_reads_what_was_received(segments: SegmentPool) -> None:
    buffer = SharedBuffers(segments, MIB).allocate(1000, aligned_at=13)
    assert buffer is not None
    view = buffer.bytes_view()
    view[:] = bytes(range(250)) * 4
    place = place_of(view[13:900])
    assert place is not None
    assert place.shm.offset % ALIGN_BYTES == 0
    worker = Segments(segments._folder)
    assert bytes(worker.view(place.shm)) == bytes(view[13:900])
    assert place_of(view[14:]) is None  # no place for a number
    assert place_of(bytes(view)) is None
    assert place_of(memoryview(bytes(view))) is None


async def test_the_last_view_frees_the_slice(segments: SegmentPool) -> None:
    buffers = SharedBuffers(segments, MIB)
    buffer = buffers.allocate(1000)
    assert buffer is not None
    part = buffer.bytes_view()[10:20]
    array = np.frombuffer(part, np.uint8)
    del buffer, part
    await turn()
    assert buffers.in_use_bytes == segments.in_use_bytes - 24 == 1000
    del array
    await turn()
    assert buffers.in_use_bytes == segments.in_use_bytes == 0


async def test_a_slice_is_free_when_its_views_and_its_batches_are_gone(segments: SegmentPool) -> None:
    buffer = SharedBuffers(segments, MIB).allocate(1000)
    assert buffer is not None
    shm = buffer.shm
    segments.share(shm)
    segments.share(shm)
    segments.free(shm)
    del buffer
    await turn()
    assert segments.in_use_bytes > 0
    segments.free(shm)
    assert segments.in_use_bytes == 0
    with pytest.raises(KeyError):
        segments.free(shm)


async def test_a_view_may_be_dropped_in_any_thread(segments: SegmentPool) -> None:
    held = [SharedBuffers(segments, MIB).allocate(1000)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    await asyncio.to_thread(thread.join)
    await turn()
    assert segments.in_use_bytes == 0


async def test_buffers_have_a_limit_of_their_own(segments: SegmentPool) -> None:
    buffers = SharedBuffers(segments, 1000)
    first = buffers.allocate(900)
    assert first is not None
    assert buffers.allocate(101) is None
    del first
    assert buffers.allocate(1000) is not None


async def test_numpy_views_free_nothing(segments: SegmentPool) -> None:
    buffers = SharedBuffers(segments, MIB)
    buffer = buffers.allocate(1000)
    assert buffer is not None
    view = buffer[10:]
    del view
    await turn()
    assert buffers.in_use_bytes == 1000
