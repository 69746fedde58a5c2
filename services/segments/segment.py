"""A shared memory segment: a file on a memory file system, mapped by its owner (a gateway) and by workers.

Plain files and mmap, not multiprocessing.shared_memory: its resource tracker removes a segment when any process that
only attached to it exits (https://github.com/python/cpython/issues/82300).
"""

from __future__ import annotations

import fcntl
import glob
import mmap
import os
from contextlib import suppress
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.segments.arena import Arena
from millstream.services.wire.batch import Place


def host_token(folder: Path) -> str:
    """Equal for two processes exactly when a file that one makes in `folder` is the same file for the other.

    The machine's boot and the file system behind the folder: containers that do not share it differ.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{folder.stat().st_dev}"


class Segment:
    """The owner's side: `size_bytes` of shared memory, handed out in places and given back by the owner alone."""

    def __init__(self, folder: Path, name: str, size_bytes: int) -> None:
        """Raises Failure(STORAGE) when the memory file system has no room or takes no file from us."""
        self.name = name
        self.arena = Arena(size_bytes)
        self._path = folder / name
        try:
            self._fd, self._map = _create(self._path, max(size_bytes, mmap.PAGESIZE))
        except OSError as error:
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


def _create(path: Path, size_bytes: int) -> tuple[int, mmap.mmap]:
    """A new file, locked and mapped. The lock is held while its owner lives: others tell a leftover by it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Reserved now: on a memory file system that is full, a sparse file would kill its writer with SIGBUS.
        os.posix_fallocate(fd, 0, size_bytes)
        return fd, mmap.mmap(fd, 0)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise


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
        if place.offset < 0 or place.offset + place.size_bytes > len(segment):
            raise Failure(Code.INTERNAL, f"a place outside of segment {place.segment}")
        return segment[place.offset : place.offset + place.size_bytes]

    def _attach(self, name: str) -> memoryview:
        if "/" in name:
            raise Failure(Code.INTERNAL, f"not the name of a segment: {name!r}")
        self.forget_removed()  # also a worker that is never idle lets go of what gateways removed
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
        """Let go of segments whose owner removed them."""
        for name in [name for name in self._maps if not (self._folder / name).exists()]:
            del self._maps[name]


def remove_leftovers(folder: Path, prefix: str) -> int:
    """Remove segments `<prefix>.…` whose owner is dead; returns how many."""
    removed = 0
    for path in folder.glob(f"{glob.escape(prefix)}.*"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_size:  # one that is just being made has its lock before it has a size
                    path.unlink()
                    removed += 1
            finally:
                os.close(fd)
    return removed
