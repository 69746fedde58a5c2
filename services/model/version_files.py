"""Reads files of a version whose paths a configuration names. Neither the path nor the folder is trusted.

path ─> plain (relative, no "..") ─> opened component by component without following links ─> a regular file ─> bytes
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import IO

from millstream.services.errors import Failure, invalid
from millstream.services.model.manifest import Manifest, ModelConfig, SourceFile
from millstream.services.model.names import plain_path
from millstream.services.model.signature import Signature, check_classes

#: Bytes of one label file, and names in it. Gateways keep them in memory; more is rejected.
LABEL_BYTES_MAX = 8 << 20
LABEL_NAMES_MAX = 1 << 18
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Without O_NONBLOCK, opening a FIFO blocks until it has a writer.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def open_inside(folder: Path, path: str, what: str = "file") -> IO[bytes]:
    """Open the regular file at `path` below `folder` for reading. No component below `folder` may be a link.

    Args:
        folder: the folder that the file must be in; it may itself be a link.
        path: the file's path below `folder`.
        what: what the file is for; begins the error message.

    Raises:
        Failure: INVALID if the path leads out of the folder, or to no regular file, or through a link.
    """
    *parents, name = PurePosixPath(plain_path(path, what)).parts
    with ExitStack() as stack:
        try:
            descriptor = os.open(folder, _FOLDER)
            stack.callback(os.close, descriptor)
            for parent in parents:
                descriptor = os.open(parent, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                stack.callback(os.close, descriptor)
            file = os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=descriptor)
        except OSError as error:
            reason = "a part of the path is a link or no folder" if _is_link(error) else error.strerror
            raise invalid(f"{what} {path[:80]!a} cannot be read: {reason}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise invalid(f"{what} {path[:80]!a} is not a regular file")
    return os.fdopen(file, "rb")


def open_regular(path: Path) -> BufferedReader:
    """Open the regular file at `path` for reading; a link is followed.

    Raises OSError, also if it is no regular file: reading a FIFO or a device could block for ever.
    """
    file = os.open(path, _FILE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(file, "rb")


def describe_file(folder: Path, path: str) -> SourceFile:
    """Return the size and sha256 of the file at `path` below `folder`. Raises OSError."""
    with open_regular(folder / path) as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        size_bytes = content.tell()
    return SourceFile(path=path, size_bytes=size_bytes, sha256=digest)


def overwritten(manifest: Manifest) -> str:
    """Return what a caller can do about a changed file of a version in place, to end a message; "" for uploads."""
    if manifest.origin is None:
        return ""
    load = f"`millstream load {manifest.model}`, or POST /v2/repository/models/{manifest.model}/load"
    return f"; it was overwritten in {manifest.origin}: {load} serves the files as they are now"


def _is_link(error: OSError) -> bool:
    # For a link, the kernel reports ENOTDIR with O_DIRECTORY, else ELOOP.
    return isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP


def read_inside(folder: Path, path: str, bytes_max: int, what: str = "file") -> bytes:
    """Return the content of the file at `path` below `folder`. Raises Failure(INVALID), also if it is too large."""
    with open_inside(folder, path, what) as file:
        try:
            content = file.read(bytes_max + 1)
        except OSError as error:
            raise invalid(f"{what} {path[:80]!a} cannot be read: {error.strerror}") from error
    if len(content) > bytes_max:
        raise invalid(f"{what} {path[:80]!a} has more than {bytes_max} bytes")
    return content


def check_labels(config: ModelConfig, signature: Signature, folder: Path) -> list[str]:
    """Return the label files that a configuration names, as sorted paths below the version's `folder`.

    Raises:
        Failure: INVALID for an output that the model does not have, and for a file that is no valid label file.
    """
    outputs = [spec.name for spec in signature.outputs]
    names: dict[str, tuple[str, ...]] = {}
    for output, path in config.labels.items():
        if output not in outputs:
            known = ", ".join(outputs[:10])
            raise invalid(f"config.labels: the model has no output {output[:80]!r}; it has {known}")
        content = read_inside(folder, path, LABEL_BYTES_MAX, f"config.labels {output[:80]!r}: file")
        names[output] = label_names(content, path)
    if config.classes is not None:
        check_classes(config.classes, signature, names.get(config.classes.output))
    return sorted(set(config.labels.values()))


def read_label_names(folder: Path, path: str, files: tuple[SourceFile, ...]) -> tuple[str, ...]:
    """Return the class names in a label file of a published version, one per line of the file.

    Args:
        folder: the version's folder.
        path: the label file's path below `folder`.
        files: of the version's manifest; the label file must be one of them, unchanged.

    Raises:
        Failure: INVALID for a file that is not the version's, or that changed since it was published.
    """
    content = read_inside(folder, path, LABEL_BYTES_MAX, "label file")
    published = next((file for file in files if file.path == path), None)
    if published is None:
        raise invalid(f"label file {path[:80]!a} is not one of the version's files")
    if hashlib.sha256(content).hexdigest() != published.sha256:
        raise invalid(f"label file {path[:80]!a} is damaged: it is not the file that was published (sha256 differs)")
    return label_names(content, path)


def label_names(content: bytes, path: str) -> tuple[str, ...]:
    """Return the lines of a label file. Raises Failure(INVALID) if it is no UTF-8 text or has too many lines."""
    if content.count(b"\n") > LABEL_NAMES_MAX:
        raise invalid(f"label file {path[:80]!a} has more than {LABEL_NAMES_MAX} lines")
    try:
        return tuple(line.strip() for line in content.decode().removesuffix("\n").split("\n"))
    except UnicodeDecodeError as error:
        raise invalid(f"label file {path[:80]!a} is not UTF-8 text") from error


def is_readable_inside(folder: Path, path: str, bytes_max: int) -> bool:
    """Return whether `path` is a regular file of at most `bytes_max` bytes below `folder`, reached without links."""
    try:
        with open_inside(folder, path) as file:
            return os.fstat(file.fileno()).st_size <= bytes_max
    except Failure:
        return False
