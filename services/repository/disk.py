"""Durable writes, locks between processes, and disk errors as Failures with one line."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from millstream.services.errors import Code, Failure

#: libraries write in pieces of up to this size, the last of which fails as a whole
FULL_BYTES = 1 << 20
#: free space of a disk below which uploads are refused; a disk smaller than the second number may be filled
RESERVE_BYTES = 256 << 20
RESERVE_DISK_BYTES_MIN = 16 * RESERVE_BYTES
LOCK_S_MAX = 10.0  # that a change waits for the lock; changes hold it for milliseconds
LOCK_PAUSE_S_MIN, LOCK_PAUSE_S_MAX = 0.001, 0.02  # between two tries; random, so that all who wait have one chance
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def read_file(path: str | Path, bytes_max: int, flags: int = 0) -> bytes:
    """Return the bytes of a regular file without blocking, which opening a pipe in its place would do.

    Args:
        path: of the file.
        bytes_max: a larger file is damaged.
        flags: further ones of open(2), such as O_NOFOLLOW.

    Raises:
        ValueError: it is no file, or larger.
        OSError: it is not there, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise ValueError("it is no file") from None
        raise
    try:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is no file")
        if about.st_size <= bytes_max:
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                content = file.read(bytes_max + 1)
            if len(content) <= bytes_max:
                return content
        raise ValueError(f"it has more than {bytes_max} bytes")
    finally:
        os.close(descriptor)


def storage_failure(error: OSError, root: Path) -> Failure:
    """Return a Failure that tells the operator what to do about `error`, which occurred in the folder `root`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        return Failure(Code.STORAGE, f"cannot write to {root}: the disk is full; free space or delete versions")
    if error.errno in _REFUSED:
        return Failure(Code.INTERNAL, f"cannot use {root}: {reason}; give this user the right to read and write it")
    return Failure(Code.INTERNAL, f"cannot use {root}: {reason} ({error.filename or 'no file named'})")


def is_of_disk(error: OSError) -> bool:
    """Return whether the disk is at fault, not the file that was asked for."""
    return error.errno in _FULL or error.errno in {errno.EROFS, errno.EIO}


class DiskSpace(NamedTuple):
    """The size of a disk, and what users without privileges may still write to it."""

    size_bytes: int
    free_bytes: int


def disk_space(folder: Path) -> DiskSpace:
    """Return the space of the disk of `folder`. Raises OSError."""
    disk = os.statvfs(folder)
    return DiskSpace(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)


def check_space(folder: Path) -> None:
    """Raise Failure(STORAGE) if the disk of `folder` is nearly full. Raises OSError."""
    size_bytes, free_bytes = disk_space(folder)
    if size_bytes >= RESERVE_DISK_BYTES_MIN and free_bytes < RESERVE_BYTES:
        raise Failure(
            Code.STORAGE,
            f"the disk of {folder} has {free_bytes >> 20} MiB left, and uploads leave {RESERVE_BYTES >> 20} MiB free: "
            "free space or delete versions",
        )


def is_full(folder: Path) -> bool:
    """Return whether the disk of `folder` has no space left, or so little that a library's last write failed."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize < FULL_BYTES or (disk.f_files > 0 and not disk.f_favail)


def tree_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; those that are removed meanwhile may count or not."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Raise every OSError of the block as a Failure: STORAGE when the disk is full, else INTERNAL."""
    try:
        yield
    except OSError as error:
        raise storage_failure(error, root) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock at `path`, also against threads of this process. The kernel releases it on death.

    Raises Failure(UNAVAILABLE) after LOCK_S_MAX: a process that is frozen while it holds the lock keeps it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    until = time.monotonic() + LOCK_S_MAX
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise Failure(
                    Code.UNAVAILABLE,
                    f"another process has held {path} for {LOCK_S_MAX:g} s: if it is frozen, end it; or try again",
                    retry_after_s=1,
                ) from None
        else:
            return
        time.sleep(random.uniform(LOCK_PAUSE_S_MIN, LOCK_PAUSE_S_MAX))


def overwrite(path: Path, content: bytes) -> None:
    """Overwrite the start of the file at `path` in one write, which needs no new block on a full disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)


class FileLock:
    """A file lock that ends with `release`, or with the process: then the kernel releases it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock; later calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_of(self, path: Path) -> bool:
        """Return whether the locked file is still the one at `path`."""
        try:
            return path.stat().st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False


def try_lock(path: Path) -> FileLock | None:
    """Lock the file at `path`, which is made if need be; None while the lock is taken."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return FileLock(descriptor)


def fsync(path: Path) -> None:
    """Write a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Write everything below `folder` to the disk, contents before the entries that name them."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync(Path(parent, name))
        fsync(Path(parent))


@contextmanager
def replacing(path: Path, content: bytes) -> Iterator[None]:
    """Replace the file at `path` by `content` when the block ends, durably; when the block raises, nothing is left.

    All writes that need space happen before the block. Callers must hold a lock, because the temporary name is fixed.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at `path` by `content`, atomically and durably. Callers must hold a lock."""
    with replacing(path, content):
        pass
