"""Reads the files of a model for an upload: a file as it is, several as a tar that is made while it is sent.

recognise ─> files that belong to the model ─> no link out of its folder ─> parts ─> pieces of bytes
The tar of the same files has the same bytes each time: sorted names, no times, no owners. Source: POSIX.1-2001 pax.
"""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.services.errors import invalid
from millstream.services.ingest.layout import Found, files_of
from millstream.services.model.version_files import open_regular

PIECE_BYTES = 256 << 10
_TAR_END = bytes(2 * tarfile.BLOCKSIZE)
#: folders of Hugging Face's cache: files of a snapshot are links to blobs of the same repository
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


class Part(NamedTuple):
    """A file, and the bytes around its content in the upload."""

    path: Path
    size_bytes: int
    before: bytes = b""
    after: bytes = b""


def parts_of(found: Found, named: Sequence[str] = ()) -> list[Part]:
    """Return what is sent of a model: its file alone, or all that belongs to it as the parts of a tar.

    `named`: further files that its configuration names. Raises Failure(INVALID) for links out of the folder, files that
    are no regular files, and as `files_of` does; OSError.
    """
    names = files_of(found, named)
    given = {found.path.name: found.path} if found.alone else {}  # a link may lead anywhere if it was named itself
    files = [(name, given.get(name) or _inside(found.root, name)) for name in names]
    sizes = [_size_bytes(path, name) for name, path in files]
    if [found.root / name for name in names] == [found.path]:
        return [Part(files[0][1], sizes[0])]
    parts = []
    for (name, path), size_bytes in zip(files, sizes, strict=True):
        entry = tarfile.TarInfo(name)
        entry.size = size_bytes
        parts.append(Part(path, size_bytes, entry.tobuf(tarfile.PAX_FORMAT), bytes(-size_bytes % tarfile.BLOCKSIZE)))
    return [*parts[:-1], parts[-1]._replace(after=parts[-1].after + _TAR_END)]


def total_bytes(parts: Iterable[Part]) -> int:
    """Return the bytes of all parts."""
    return sum(part.size_bytes + len(part.before) + len(part.after) for part in parts)


def pieces(parts: Sequence[Part]) -> Iterator[bytes]:
    """Yield the bytes of an upload. Raises Failure(INVALID) if a file has changed since; OSError."""
    for part in parts:
        if part.before:
            yield part.before
        left = part.size_bytes
        with open_regular(part.path) as file:
            while piece := file.read(PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
        if left:
            raise invalid(f"{part.path.name}: the file changed while it was read")
        if part.after:
            yield part.after


def _inside(root: Path, name: str) -> Path:
    """Return the file that a name below `root` leads to. Raises Failure(INVALID) if a link leads out of it; OSError."""
    path = (root / name).resolve(strict=True)
    allowed = [root.resolve()]
    allowed += [parent.parent / _BLOBS for parent in allowed[0].parents if parent.name == _SNAPSHOTS]
    if not any(path.is_relative_to(folder) for folder in allowed):
        raise invalid(f"{name} is a link out of the folder: copy the file into it")
    return path


def _size_bytes(path: Path, name: str) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise invalid(f"{name} is neither a file nor a folder")
    return status.st_size
