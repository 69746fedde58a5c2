"""local_files: reads model files on this machine as the body of an upload, for management calls that name a path.

path ─> below MILLSTREAM_IMPORT_DIR? ─> bytes of a file, or a tar of a folder, piece by piece ─> admin.upload
"""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from millstream.gateway.tensors.json_document import excerpt
from millstream.services.errors import Code, Failure, invalid, not_found
from millstream.services.ingest.archive import ENTRIES_MAX

_PIECE_BYTES = 1 << 20
_BLOCK_BYTES = 512
_SCHEME = "file"


def locate(folder: Path | None, url: str) -> Path:
    """Return the file or folder that a management call names. Blocking.

    Args:
        folder: Only paths below this folder are allowed; None: no path is allowed.
        url: A path, absolute or relative to `folder`, or a file:// URL.

    Raises:
        Failure: UNSUPPORTED (no folder is allowed, or another scheme), INVALID (outside the folder), NOT_FOUND.
    """
    parts = urlsplit(url) if "://" in url else None
    if parts is not None and parts.scheme.lower() != _SCHEME:
        raise Failure(
            Code.UNSUPPORTED,
            f"no model is fetched from '{excerpt(url)}': put the file below MILLSTREAM_IMPORT_DIR, or upload it with "
            "PUT /admin/v1/models/NAME/versions/N",
        )
    if folder is None:
        raise Failure(
            Code.UNSUPPORTED, "models are registered from files only where MILLSTREAM_IMPORT_DIR names their folder"
        )
    path = unquote(parts.path) if parts is not None else url
    if not path or "\0" in path:
        raise invalid("'url' is the path of a model file")
    try:
        root = folder.resolve()
        located = (root / path).resolve()
        inside = located.is_relative_to(root)
        exists = inside and located.exists()
    except (OSError, RuntimeError, ValueError):
        raise invalid(f"'{excerpt(path)}' is not a path") from None
    if not inside:
        raise invalid(f"'{excerpt(path)}' is not below {root}: models are registered from there only")
    if not exists:
        raise not_found(f"there is no file '{excerpt(path)}' below {root}")
    return located


async def content(path: Path) -> AsyncIterator[bytes]:
    """Yield the bytes of a file, or of a tar of a folder. Raises Failure(INVALID) for links and devices."""
    pieces = _file(path) if path.is_file() else _folder(_model_folder(path))
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _model_folder(path: Path) -> Path:
    """Return the folder to pack: `path`, or the folder below it that has the only model.

    In Triton's repositories a model is below the model's folder, in a version's folder.
    """
    if any(path.glob("*.onnx")):
        return path
    models = []
    for count, model in enumerate(path.rglob("*.onnx")):
        if count == ENTRIES_MAX:
            break
        models.append(model)
    return models[0].parent if len(models) == 1 else path


def _file(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _folder(folder: Path) -> Iterator[bytes]:
    for count, path in enumerate(sorted(folder.rglob("*"))):
        if count == ENTRIES_MAX:
            raise invalid(f"{folder.name} has more than {ENTRIES_MAX} files")
        if path.is_dir() and not path.is_symlink():
            continue
        with _opened(path) as file:
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            info.size = os.fstat(file.fileno()).st_size
            yield info.tobuf(tarfile.PAX_FORMAT)
            unread = info.size
            while unread:
                piece = file.read(min(_PIECE_BYTES, unread))
                if not piece:
                    raise invalid(f"{path.name} became shorter while it was read")
                unread -= len(piece)
                yield piece
            yield b"\0" * (-info.size % _BLOCK_BYTES)
    yield b"\0" * (2 * _BLOCK_BYTES)


def _opened(path: Path) -> IO[bytes]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise invalid(f"{path.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise invalid(f"{path.name} is a link or device: only plain files are accepted")
    return os.fdopen(descriptor, "rb")
