"""A shared memory segment: a file on a memory file system, mapped by its owner (a gateway) and by workers.

multiprocessing.shared_memory is not used: its resource tracker removes a segment when any process that only attached
to it exits (https://github.com/python/cpython/issues/82300).
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import mmap
import os
import shutil
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.wire.batch import ShmSlice

ALIGN_BYTES = 64  # a cache line, and sufficient for every vector load


class Arena:
    """Allocates offsets in `size_bytes` bytes; sizes are rounded up to multiples of ALIGN_BYTES."""

    __slots__ = ("_free", "_taken", "in_use_bytes", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGN_BYTES * ALIGN_BYTES
        self.in_use_bytes = 0
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)] if self.size_bytes else []
        self._taken: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a free range of at least `size_bytes` (at least 1), or None."""
        size = -(-max(size_bytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
        for i, (start, length) in enumerate(self._free):
            if length >= size:
                if length == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, length - size)
                self._taken[start] = size
                self.in_use_bytes += size
                return start
        return None

    def free(self, offset: int) -> None:
        """Free a range. Raises KeyError if it is not allocated: a double free must not go unnoticed."""
        size = self._taken.pop(offset)
        self.in_use_bytes -= size
        i = bisect_left(self._free, (offset, 0))
        end = offset + size
        if i < len(self._free) and self._free[i][0] == end:
            end += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            offset = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (offset, end - offset))


def host_token(folder: Path) -> str:
    """Return a token that is equal for two processes exactly if they share the files in `folder`.

    It names the machine's boot and the file system of the folder: containers that do not share it differ.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{folder.stat().st_dev}"


class Segment:
    """The owner's side: `size_bytes` of shared memory, from which only the owner allocates slices.

    Raises Failure(STORAGE) if the memory file system is full, or this process cannot create a file there.
    """

    def __init__(self, folder: Path, name: str, size_bytes: int) -> None:
        self.name = name
        self.arena = Arena(size_bytes)
        self._path = folder / name
        try:
            self._fd, self._map = _create(self._path, max(size_bytes, mmap.PAGESIZE))
        except OSError as error:
            raise Failure(Code.STORAGE, f"no shared memory of {size_bytes} bytes in {folder}: {error}") from error
        self.view = memoryview(self._map)

    def allocate(self, size_bytes: int) -> ShmSlice | None:
        """Return a slice of `size_bytes` bytes, or None if there is no room for it."""
        offset = self.arena.allocate(size_bytes)
        return None if offset is None else ShmSlice(self.name, offset, size_bytes)

    def free(self, shm: ShmSlice) -> None:
        self.arena.free(shm.offset)

    def close(self) -> None:
        """Remove the segment. Views that are still in use keep their memory."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        self.view.release()
        with suppress(BufferError):
            self._map.close()
        os.close(self._fd)


def _create(path: Path, size_bytes: int) -> tuple[int, mmap.mmap]:
    """Create, lock and map a file. Its owner keeps the lock until it ends; a file without lock is a leftover."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Reserved now: when the memory file system is full, writing to a sparse file kills the process with SIGBUS.
        os.posix_fallocate(fd, 0, size_bytes)
        return fd, mmap.mmap(fd, 0)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise


class Segments:
    """A worker's side: segments of gateways, mapped at first use and unmapped when their gateway has removed them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, memoryview] = {}

    def view(self, shm: ShmSlice) -> memoryview:
        """Return the bytes of a slice, writable. Raises Failure(UNAVAILABLE) if its gateway is gone."""
        segment = self._maps.get(shm.segment)
        if segment is None:
            segment = self._attach(shm.segment)
        if shm.offset < 0 or shm.offset + shm.size_bytes > len(segment):
            raise Failure(Code.INTERNAL, f"a slice outside of segment {shm.segment}")
        return segment[shm.offset : shm.offset + shm.size_bytes]

    def _attach(self, name: str) -> memoryview:
        if "/" in name:
            raise Failure(Code.INTERNAL, f"not the name of a segment: {name!r}")
        self.forget_removed()  # here too, for a worker that is never idle
        try:
            fd = os.open(self._folder / name, os.O_RDWR)
        except OSError as error:
            raise Failure(Code.UNAVAILABLE, f"segment {name} is gone: {error}") from error
        try:
            segment = memoryview(mmap.mmap(fd, 0))
        except (OSError, ValueError) as error:
            raise Failure(Code.UNAVAILABLE, f"segment {name} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._maps[name] = segment
        return segment

    def forget_removed(self) -> None:
        """Unmap segments that their owner removed."""
        for name in [name for name in self._maps if not (self._folder / name).exists()]:
            del self._maps[name]


def remove_leftovers(folder: Path, prefix: str) -> int:
    """Remove segments `<prefix>.…` whose owner has ended; returns how many."""
    removed = 0
    for path in folder.glob(f"{glob.escape(prefix)}.*"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_size:  # a new segment has its lock before it has a size
                    path.unlink()
                    removed += 1
            finally:
                os.close(fd)
    return removed


def remove_segments(folder: Path, prefix: str) -> int:
    """Remove all files and folders named `<prefix>.*` in `folder`; return their number."""
    removed = 0
    for path in folder.glob(f"{glob.escape(prefix)}.*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed += 1
    return removed
