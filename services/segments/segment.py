"""A shared memory segment: a file on a memory file system, mapped by its owner (a gateway) and by workers.

Plain files and mmap, not multiprocessing.shared_memory: its resource tracker removes a segment when any process that
only attached to it exits (https://github.com/python/cpython/issues/82300).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path

from services.batch import Place
from services.errors import Code, Failure
from services.segments.arena import Arena


def host_token(folder: Path) -> str:
    """Equal for two processes exactly when a file that one makes in `folder` is the same file for the other.

    The machine's boot and the file system behind the folder: containers that do not share it differ.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{folder.stat().st_dev}"


class Segment:
    """The owner's side: `size_bytes` of shared memory, handed out in places and given back by the owner alone."""

    def __init__(self, folder: Path, name: str, size_bytes: int) -> None:
        """Raises Failure(STORAGE) when the memory file system has no room."""
        self.name = name
        self.arena = Arena(size_bytes)
        self._path = folder / name
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # held while the owner lives: others may tell a leftover by it
            # Reserved now: on a memory file system that is full, a sparse file would kill its writer with SIGBUS.
            os.posix_fallocate(self._fd, 0, max(size_bytes, mmap.PAGESIZE))
            self._map = mmap.mmap(self._fd, 0)
        except OSError as error:
            self._path.unlink()
            os.close(self._fd)
            raise Failure(Code.STORAGE, f"no shared memory of {size_bytes} bytes in {folder}: {error}") from error
        self.view = memoryview(self._map)

    def allocate(self, size_bytes: int) -> Place | None:
        """A place for `size_bytes` bytes, or None when the segment is full."""
        offset = self.arena.allocate(size_bytes)
        return None if offset is None else Place(self.name, offset, size_bytes)

    def free(self, place: Place) -> None:
        self.arena.free(place.offset)

    def close(self) -> None:
        """Remove the segment. Views that are still used keep their memory until they are gone."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        self.view.release()
        with suppress(BufferError):
            self._map.close()
        os.close(self._fd)


class Segments:
    """A worker's side: segments of gateways, mapped when first needed and let go when their gateway is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, memoryview] = {}

    def view(self, place: Place) -> memoryview:
        """The bytes of a place, writable. Raises Failure(UNAVAILABLE) when its gateway is gone."""
        segment = self._maps.get(place.segment)
        if segment is None:
            segment = self._attach(place.segment)
        if place.offset + place.size_bytes > len(segment):
            raise Failure(Code.INTERNAL, f"a place outside of segment {place.segment}")
        return segment[place.offset : place.offset + place.size_bytes]

    def _attach(self, name: str) -> memoryview:
        if "/" in name:
            raise Failure(Code.INTERNAL, f"not the name of a segment: {name!r}")
        try:
            fd = os.open(self._folder / name, os.O_RDWR)
        except OSError as error:
            raise Failure(Code.UNAVAILABLE, f"segment {name} is gone: {error}") from error
        try:
            segment = memoryview(mmap.mmap(fd, 0))
        finally:
            os.close(fd)
        self._maps[name] = segment
        return segment

    def forget_removed(self) -> None:
        """Let go of segments whose owner removed them."""
        for name in [name for name in self._maps if not (self._folder / name).exists()]:
            del self._maps[name]


def remove_leftovers(folder: Path, prefix: str) -> int:
    """Remove segments `<prefix>-…` whose owner is dead; returns how many."""
    removed = 0
    for path in folder.glob(f"{prefix}-*"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
            finally:
                os.close(fd)
    return removed
