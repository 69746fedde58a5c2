"""What makes a folder trustworthy: durable writes, a lock between processes, disk errors said in one line."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.services.errors import Code, Failure

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def storage_failure(error: OSError, root: Path) -> Failure:
    """The Failure that tells an operator what to do about `error`, met while using the folder `root`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        return Failure(Code.STORAGE, f"cannot write to {root}: the disk is full; free space or delete versions")
    if error.errno in _REFUSED:
        return Failure(Code.INTERNAL, f"cannot use {root}: {reason}; give this user the right to read and write it")
    return Failure(Code.INTERNAL, f"cannot use {root}: {reason} ({error.filename or 'no file named'})")


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Turn every OSError of the block into its Failure: STORAGE when the disk is full, else INTERNAL."""
    try:
        yield
    except OSError as error:
        raise storage_failure(error, root) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file lock at `path` against every other thread and process. The kernel drops it when its holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def overwrite(path: Path, content: bytes) -> None:
    """Put `content` over the start of the file at `path` in one write, which needs no new block on a full disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock at `path` until it is closed; None while somebody else holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def fsync(path: Path) -> None:
    """Bring a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Bring everything below `folder` to the disk, contents before the entries that name them."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync(Path(parent, name))
        fsync(Path(parent))


@contextmanager
def replacing(path: Path, content: bytes) -> Iterator[None]:
    """Make `content` the file at `path` when the block ends, durably; nothing is left of it when the block raises.

    All that needs room is done before the block. Callers hold a lock: the temporary name is a fixed one.
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
    """Make `content` the file at `path`, all or nothing, durably. Callers hold a lock."""
    with replacing(path, content):
        pass
