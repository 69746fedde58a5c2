"""local_files: reads model files on this machine as the body of an upload, for management calls that name a path.

path ─> below MILLSTREAM_IMPORT_DIR? ─> bytes of a file, or a tar of a folder, piece by piece ─> admin.upload
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from millstream.gateway.tensors.json_document import excerpt
from millstream.services.errors import Code, Failure, invalid, not_found
from millstream.services.ingest.layout import recognise
from millstream.services.ingest.packing import parts_of, pieces

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
    """Yield the bytes of the model in a file or folder. Raises Failure(INVALID) for what is none, links and devices."""
    read = await asyncio.to_thread(lambda: pieces(parts_of(recognise(path))))
    while (piece := await asyncio.to_thread(next, read, None)) is not None:
        yield piece
